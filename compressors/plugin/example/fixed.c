/*
 * fixed: fixed-point numbers of 8 or 4 bits with one power of two for the unit. Nothing is drawn
 * and nothing divided, so what is decoded is exact in any language.
 *
 * Payload of n elements: i16 exponent e, little-endian; then a code q for each element, value
 * q * 2^e: 8 bits: i8[n]; 4 bits: two a byte, the first in the low half, the last half 0 if n is
 * odd. e is the smallest from -149 to 121 (4 bits: 125) for which no element is beyond 127 * 2^e
 * (7 * 2^e), the last of them if there is none, since a larger one decodes to infinity; 0 if all
 * are zero. Codes are x / 2^e to the nearest, ties to even, at most 127 (7) in magnitude.
 */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gradwire/plugin.h>

enum { LEAST_EXPONENT = -149, HEADER_BYTES = 2 };

typedef struct fixed_codec {
  int bits;
  int most; /* the largest code */
  int most_exponent;
} fixed_codec;

static int create(const gradwire_parameter* parameters, size_t num_parameters, void** codec,
                  const gradwire_plugin_error* error) {
  fixed_codec* made = malloc(sizeof *made);
  size_t i;
  if (made == NULL) {
    snprintf(error->text, error->capacity, "out of memory");
    return 1;
  }
  made->bits = 8;
  for (i = 0; i < num_parameters; ++i) {
    if (strcmp(parameters[i].name, "bits") == 0) made->bits = atoi(parameters[i].value);
  }
  made->most = (1 << (made->bits - 1)) - 1;
  made->most_exponent = made->bits == 8 ? 121 : 125;
  *codec = made;
  return 0;
}

static void destroy(void* codec) { free(codec); }

static size_t payload_size(const fixed_codec* codec, size_t n) {
  return HEADER_BYTES + (codec->bits == 8 ? n : n / 2 + n % 2);
}

static size_t max_encoded_size(const void* codec, size_t num_elements) {
  return payload_size(codec, num_elements);
}

static int exponent_of(const fixed_codec* codec, double largest) {
  int e;
  if (largest == 0) return 0;
  frexp(largest, &e); /* largest < 2^e, so this is at most one too high */
  e -= codec->bits - 2;
  if (largest <= ldexp(codec->most, e - 1)) --e;
  if (e < LEAST_EXPONENT) return LEAST_EXPONENT;
  return e > codec->most_exponent ? codec->most_exponent : e;
}

static int encode(const void* codec, const gradwire_codec_context* context, const float* input,
                  size_t num_elements, uint8_t* output, size_t* payload_bytes,
                  const gradwire_plugin_error* error) {
  const fixed_codec* fixed = codec;
  double largest = 0;
  double scale;
  size_t i;
  int e;
  (void)context;
  (void)error;
  for (i = 0; i < num_elements; ++i) largest = fmax(largest, fabs(input[i]));
  e = exponent_of(fixed, largest);
  scale = ldexp(1.0, -e);
  *payload_bytes = payload_size(fixed, num_elements);
  memset(output, 0, *payload_bytes);
  output[0] = (uint8_t)(e & 0xff);
  output[1] = (uint8_t)((e >> 8) & 0xff);
  for (i = 0; i < num_elements; ++i) {
    const double rounded = nearbyint(input[i] * scale);
    const int q = (int)fmin(fmax(rounded, -fixed->most), fixed->most);
    if (fixed->bits == 8) {
      output[HEADER_BYTES + i] = (uint8_t)(q & 0xff);
    } else {
      output[HEADER_BYTES + i / 2] |= (uint8_t)((q & 0xf) << (i % 2 * 4));
    }
  }
  return 0;
}

static int exponent_in(const uint8_t* payload) {
  const int e = payload[0] | payload[1] << 8;
  return e < 0x8000 ? e : e - 0x10000;
}

static int code_in(const fixed_codec* codec, const uint8_t* payload, size_t i) {
  const int limit = codec->most + 1;
  const int raw = codec->bits == 8 ? payload[HEADER_BYTES + i]
                                   : payload[HEADER_BYTES + i / 2] >> (i % 2 * 4) & 0xf;
  return raw < limit ? raw : raw - 2 * limit;
}

static int validate(const void* codec, const uint8_t* payload, size_t payload_bytes,
                    size_t num_elements, const gradwire_plugin_error* error) {
  const fixed_codec* fixed = codec;
  size_t i;
  int e;
  if (payload_bytes != payload_size(fixed, num_elements)) {
    snprintf(error->text, error->capacity, "expected %zu bytes", payload_size(fixed, num_elements));
    return 1;
  }
  e = exponent_in(payload);
  if (e < LEAST_EXPONENT || e > fixed->most_exponent) {
    snprintf(error->text, error->capacity, "exponent %d is out of range", e);
    return 1;
  }
  for (i = 0; i < num_elements; ++i) {
    if (code_in(fixed, payload, i) < -fixed->most) {
      snprintf(error->text, error->capacity, "element %zu has a code below %d", i, -fixed->most);
      return 1;
    }
  }
  if (fixed->bits == 4 && num_elements % 2 != 0 && payload[payload_bytes - 1] >> 4 != 0) {
    snprintf(error->text, error->capacity, "the unused half of the last byte is not 0");
    return 1;
  }
  return 0;
}

static void decode(const void* codec, const gradwire_codec_context* context, const uint8_t* payload,
                   size_t payload_bytes, float* output, size_t num_elements) {
  const double scale = ldexp(1.0, exponent_in(payload));
  size_t i;
  (void)context;
  (void)payload_bytes;
  for (i = 0; i < num_elements; ++i) output[i] = (float)(code_in(codec, payload, i) * scale);
}

static const char* const bits_choices[] = {"8", "4"};

static const gradwire_parameter_info parameters[] = {
    {"bits", GRADWIRE_PARAMETER_CHOICE, "8", 0, 0, bits_choices, 2, "bits of an element"},
};

static const gradwire_compressor fixed = {
    sizeof(gradwire_compressor),
    "fixed",
    "1",
    "fixed-point numbers with a power of two for the unit",
    "gradwire's example of a plug-in",
    GRADWIRE_CLASS_CONTRACTIVE,
    GRADWIRE_FIXED_SIZE | GRADWIRE_WANTS_FEEDBACK,
    parameters,
    1,
    create,
    destroy,
    max_encoded_size,
    encode,
    validate,
    decode,
};

static const gradwire_compressor* const compressors[] = {&fixed};
static const gradwire_plugin plugin = {GRADWIRE_PLUGIN_ABI_VERSION, compressors, 1};

const gradwire_plugin* gradwire_get_plugin(uint32_t abi_version) {
  (void)abi_version;
  return &plugin;
}
