#pragma once

/**
 * Compressors from outside: what a shared library looks like that Gradwire loads as a plug-in.
 * Plain C, so that any compiler and language will do. docs/plugins.md shows how to write, build,
 * name and debug one.
 *
 * A plug-in exports one function, gradwire_get_plugin. Everything that it returns is constant and
 * lives as long as the process; a loaded plug-in is never unloaded.
 *
 * Rules for all callbacks:
 * - Any thread may call them, several at once, with the same codec. A codec is constant.
 * - They neither throw, print, exit, nor keep a pointer that they were given.
 * - Arrays of floats are aligned as floats are. Payloads may be at any address.
 * - The same input gives the same bytes on every machine. The calling thread computes as IEEE 754
 *   says: round to nearest even, denormals kept.
 * - num_elements is at least 1: units without elements never get here.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Of this file. A plug-in and a program with different numbers do not go together. */
#define GRADWIRE_PLUGIN_ABI_VERSION 1

/** What a parameter's text may be. The program checks it before `create` sees it. */
#define GRADWIRE_PARAMETER_NUMBER 0  /* from min to max, both included */
#define GRADWIRE_PARAMETER_INTEGER 1 /* a whole number from min to max */
#define GRADWIRE_PARAMETER_BOOL 2    /* true or false */
#define GRADWIRE_PARAMETER_CHOICE 3  /* one of choices */

typedef struct gradwire_parameter_info {
  const char* name;
  uint32_t kind;
  const char* default_value; /* NULL: none, the parameter may be left out */
  double min;
  double max;
  const char* const* choices; /* num_choices texts, else NULL */
  size_t num_choices;
  const char* description;
} gradwire_parameter_info;

/** A parameter's checked value, as it is written in the configuration. */
typedef struct gradwire_parameter {
  const char* name;
  const char* value;
} gradwire_parameter;

/** Where an error is described. */
typedef struct gradwire_plugin_error {
  char* text;      /* to be filled with text that ends with a zero */
  size_t capacity; /* bytes at `text` */
} gradwire_plugin_error;

/** What an encode or decode call is told beside the data: seeds for codecs that draw. */
typedef struct gradwire_codec_context {
  uint64_t stream_seed; /* differs from sender to sender; the decoder is told the same */
  uint64_t shared_seed; /* the same for all workers of a round */
} gradwire_codec_context;

/** What a compressor promises of C(x) = decode(encode(x)); plans and tools show it. */
#define GRADWIRE_CLASS_NO_CLAIM 0
#define GRADWIRE_CLASS_EXACT 1       /* C(x) = x */
#define GRADWIRE_CLASS_CONTRACTIVE 2 /* |C(x) - x|^2 <= (1 - delta) |x|^2, delta > 0 */
#define GRADWIRE_CLASS_UNBIASED 3    /* the expectation of C(x) is x */
#define GRADWIRE_CLASS_BOUNDED 4     /* |C(x)[i] - x[i]| is bounded whatever x is */

/** Every payload of n elements has max_encoded_size(n) bytes. */
#define GRADWIRE_FIXED_SIZE 1u
/** `feedback: auto` means `ef`: what was not sent is kept and sent later. The program does it. */
#define GRADWIRE_WANTS_FEEDBACK 2u

/** One compressor. All functions are needed. */
typedef struct gradwire_compressor {
  size_t size;         /* sizeof(gradwire_compressor) */
  const char* name;    /* as the configuration names it: printable, without ( ) , = and spaces */
  const char* version; /* of the payload's format: all processes of a job must have the same */
  const char* description;
  const char* source; /* paper or page */
  uint32_t compressor_class;
  uint32_t flags;
  const gradwire_parameter_info* parameters;
  size_t num_parameters;

  /** Makes a codec: the compressor with its parameters bound. Those with a default are all there.
   *  Returns 0 and sets *codec, or anything else and describes the error. */
  int (*create)(const gradwire_parameter* parameters, size_t num_parameters, void** codec,
                const gradwire_plugin_error* error);
  void (*destroy)(void* codec);

  /** Bytes that a payload of this many elements has at most: no more than
   *  8 * num_elements + 65536. */
  size_t (*max_encoded_size)(const void* codec, size_t num_elements);

  /** Writes the payload of the values, all of them finite, to output[max_encoded_size].
   *  Returns 0 and sets *payload_bytes, or anything else and describes the error, which ends the
   *  job. */
  int (*encode)(const void* codec, const gradwire_codec_context* context, const float* input,
                size_t num_elements, uint8_t* output, size_t* payload_bytes,
                const gradwire_plugin_error* error);

  /** Checks all that `decode` relies on; the bytes come from the network.
   *  Returns 0 if the payload is one of this many elements, anything else and describes the error
   *  if it is not. */
  int (*validate)(const void* codec, const uint8_t* payload, size_t payload_bytes,
                  size_t num_elements, const gradwire_plugin_error* error);

  /** Sets all of output[num_elements] to finite values. The payload has passed `validate`. */
  void (*decode)(const void* codec, const gradwire_codec_context* context, const uint8_t* payload,
                 size_t payload_bytes, float* output, size_t num_elements);
} gradwire_compressor;

typedef struct gradwire_plugin {
  uint32_t abi_version; /* GRADWIRE_PLUGIN_ABI_VERSION; the first field in every version */
  const gradwire_compressor* const* compressors;
  size_t num_compressors;
} gradwire_plugin;

#if defined(__GNUC__)
#define GRADWIRE_PLUGIN_EXPORT __attribute__((visibility("default")))
#else
#define GRADWIRE_PLUGIN_EXPORT
#endif

/** The one function of a plug-in. `abi_version` is the program's. */
GRADWIRE_PLUGIN_EXPORT const gradwire_plugin* gradwire_get_plugin(uint32_t abi_version);

#ifdef __cplusplus
}
#endif
