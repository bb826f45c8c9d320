/*
 * Libraries that must not be taken for plug-ins, chosen by a macro: PLUGIN_EMPTY has no entry
 * function, PLUGIN_FUTURE another ABI version, PLUGIN_GARBAGE says sizes that cannot be, and
 * PLUGIN_TAKEN has a compressor with a built-in name.
 */

#include <gradwire/plugin.h>

#ifdef PLUGIN_EMPTY
GRADWIRE_PLUGIN_EXPORT int not_an_entry(void);
int not_an_entry(void) { return 0; }
#else

#if defined(PLUGIN_FUTURE)
#define ABI (GRADWIRE_PLUGIN_ABI_VERSION + 1)
#else
#define ABI GRADWIRE_PLUGIN_ABI_VERSION
#endif
#ifdef PLUGIN_TAKEN
#define NAME "topk"
#else
#define NAME "garbage"
#endif

static int create(const gradwire_parameter* parameters, size_t num_parameters, void** codec,
                  const gradwire_plugin_error* error) {
  (void)parameters, (void)num_parameters, (void)error;
  *codec = 0;
  return 0;
}
static void destroy(void* codec) { (void)codec; }
static size_t max_encoded_size(const void* codec, size_t n) {
  (void)codec;
  return n;
}
static int encode(const void* codec, const gradwire_codec_context* context, const float* input,
                  size_t n, uint8_t* output, size_t* payload_bytes,
                  const gradwire_plugin_error* error) {
  (void)codec, (void)context, (void)input, (void)output, (void)error;
  *payload_bytes = (size_t)1 << 60 | n;
  return 0;
}
static int validate(const void* codec, const uint8_t* payload, size_t bytes, size_t n,
                    const gradwire_plugin_error* error) {
  (void)codec, (void)payload, (void)bytes, (void)n, (void)error;
  return 0;
}
static void decode(const void* codec, const gradwire_codec_context* context, const uint8_t* payload,
                   size_t bytes, float* output, size_t n) {
  size_t i;
  (void)codec, (void)context, (void)payload, (void)bytes;
  for (i = 0; i < n; ++i) output[i] = 0;
}

static const gradwire_compressor compressor = {
    sizeof(gradwire_compressor), NAME, "1", "", "", GRADWIRE_CLASS_NO_CLAIM, 0, 0, 0,
    create, destroy, max_encoded_size, encode, validate, decode,
};
static const gradwire_compressor* const compressors[] = {&compressor};
static const gradwire_plugin plugin = {ABI, compressors, 1};

const gradwire_plugin* gradwire_get_plugin(uint32_t abi_version) {
  (void)abi_version;
  return &plugin;
}
#endif
