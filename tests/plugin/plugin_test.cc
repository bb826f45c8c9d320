#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "common/config/process.h"
#include "compressors/plugin/check.h"
#include "compressors/plugin/plugins.h"
#include "compressors/wire_ids.h"
#include "tests/catch.h"

namespace gradwire {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string PathOf(const char* library) {
  return std::string(GRADWIRE_TEST_PLUGIN_DIR) + "/" + library;
}

std::shared_ptr<const CompressorRegistry> Loaded(const std::string& path) {
  auto registry = LoadPlugins({path});
  INFO(registry.status().message());
  REQUIRE(registry.ok());
  return registry.value();
}

std::string LoadFault(const std::vector<std::string>& paths) {
  const auto registry = LoadPlugins(paths);
  REQUIRE_FALSE(registry.ok());
  CHECK(registry.status().code() == StatusCode::kInvalidArgument);
  return registry.status().message();
}

// ---- A compressor inside of the test, of which anything can be wrong ----------------------------

/// What `mine` does instead of what it should. Its payload are the floats themselves.
struct Behaviour {
  std::size_t extra_bound = 0;  // added to max_encoded_size
  std::size_t extra_bytes = 0;  // said of a payload that does not have them
  std::size_t least_scribble = std::numeric_limits<std::size_t>::max();  // writes beyond from here
  bool encode_fails = false;
  bool endless_text = false;
  bool sets_no_size = false;
  bool decodes_nan = false;
  bool decodes_ones = false;
  bool draws = false;  // other bytes each time
  bool accepts_all = false;
  int calls = 0;
  int codecs = 0;  // that are alive
};
Behaviour behaviour;

void Say(const gradwire_plugin_error* error, const char* text) {
  if (behaviour.endless_text) {
    std::memset(error->text, 'x', error->capacity);
  } else {
    std::strncpy(error->text, text, error->capacity - 1);
  }
}

gradwire_compressor Mine() {
  gradwire_compressor c = {};
  c.size = sizeof(c);
  c.name = "mine";
  c.version = "3";
  c.compressor_class = GRADWIRE_CLASS_EXACT;
  c.create = [](const gradwire_parameter*, std::size_t, void** codec,
                const gradwire_plugin_error*) {
    ++behaviour.codecs;
    *codec = &behaviour;
    return 0;
  };
  c.destroy = [](void*) { --behaviour.codecs; };
  c.max_encoded_size = [](const void*, std::size_t n) { return 4 * n + behaviour.extra_bound; };
  c.encode = [](const void*, const gradwire_codec_context*, const float* input, std::size_t n,
                std::uint8_t* output, std::size_t* bytes, const gradwire_plugin_error* error) {
    if (behaviour.encode_fails) {
      Say(error, "no more\npaper");
      return 1;
    }
    std::memcpy(output, input, 4 * n);
    if (n >= behaviour.least_scribble) output[4 * n] = 0;
    if (behaviour.draws) output[0] = static_cast<std::uint8_t>(++behaviour.calls);
    if (!behaviour.sets_no_size) *bytes = 4 * n + behaviour.extra_bytes;
    return 0;
  };
  c.validate = [](const void*, const std::uint8_t*, std::size_t bytes, std::size_t n,
                  const gradwire_plugin_error* error) {
    if (behaviour.accepts_all || bytes == 4 * n) return 0;
    Say(error, "wrong size");
    return 1;
  };
  c.decode = [](const void*, const gradwire_codec_context*, const std::uint8_t* payload,
                std::size_t bytes, float* output, std::size_t n) {
    std::fill_n(output, n, 0.0F);
    std::memcpy(output, payload, std::min(bytes, 4 * n));
    for (std::size_t i = 0; i < n; ++i) output[i] = std::isfinite(output[i]) ? output[i] : 0.0F;
    if (behaviour.decodes_nan) output[n - 1] = kNan;
    if (behaviour.decodes_ones) std::fill_n(output, n, 1.0F);
  };
  return c;
}

/// A registry with one compressor of a plug-in, which lives as long as this.
struct InTest {
  explicit InTest(gradwire_compressor made = Mine()) : compressor(made) { behaviour = {}; }

  Result<std::shared_ptr<const CompressorRegistry>> Register() const {
    return RegisterPlugins({{"test.so", &plugin}});
  }
  std::string Fault() const {
    const auto registry = Register();
    REQUIRE_FALSE(registry.ok());
    return registry.status().message();
  }
  std::unique_ptr<const Compressor> Make() const {
    const auto registry = Register();
    REQUIRE(registry.ok());
    auto made = (*registry)->Create("mine");
    REQUIRE(made.ok());
    return std::move(made).value();
  }

  gradwire_compressor compressor;
  const gradwire_compressor* list[1] = {&compressor};
  gradwire_plugin plugin = {GRADWIRE_PLUGIN_ABI_VERSION, list, 1};
};

// ---- The example --------------------------------------------------------------------------------

TEST_CASE("the example of a plug-in keeps the rules and its golden bytes", "[plugin]") {
  const auto registry = Loaded(PathOf("libplugin_fixed.so"));
  const CompressorInfo* info = registry->Find("fixed");
  REQUIRE(info != nullptr);
  CHECK(info->wire_id == wire_id::kFirstPluginId);
  CHECK(info->version == "1");
  CHECK(registry->entries().size() == BuiltinCompressors().entries().size() + 1);
  CHECK(DescribePluginCompressors(*registry) == "[fixed 1]");
  CHECK(DescribePluginCompressors(BuiltinCompressors()) == "[]");

  for (const char* spec : {"fixed", "fixed(bits=8)", "fixed(bits=4)"}) {
    CAPTURE(spec);
    const auto codec = registry->Create(spec);
    REQUIRE(codec.ok());
    CHECK((*codec)->name() == "fixed");
    CHECK((*codec)->traits().feedback_by_default);
    CHECK((*codec)->traits().fixed_size);
    CHECK((*codec)->traits().compressor_class == CompressorClass::kContractive);
    CHECK((*codec)->MaxEncodedSize(9) == (spec == std::string("fixed(bits=4)") ? 7 : 11));
    CHECK(CheckCodec(**codec) == std::vector<std::string>{});
  }
  const std::string golden =
      std::string(GRADWIRE_SOURCE_DIR) + "/compressors/plugin/example/golden";
  CHECK(CheckGoldenFiles(*registry, golden) == std::vector<std::string>{});
  CHECK(CheckGoldenFiles(BuiltinCompressors(), golden).size() > 10);
  CHECK(CheckGoldenFiles(*registry, "/nonexistent").size() == 1);
  CHECK(CheckGoldenFiles(*registry, GRADWIRE_SOURCE_DIR).size() == 1);

  const auto wrong = registry->Create("fixed(bits=5)");
  REQUIRE_FALSE(wrong.ok());
  CHECK(Has(wrong.status().message(), "bits of compressor fixed is '5', expected one of 8, 4"));
}

// ---- What the adapter adds ----------------------------------------------------------------------

TEST_CASE("a plug-in gets feedback for nothing: q = g + alpha e is sent, q - C(q) stays",
          "[plugin]") {
  const auto registry = Loaded(PathOf("libplugin_fixed.so"));
  const auto made = registry->Create("fixed(bits=4)");
  REQUIRE(made.ok());
  const Compressor& codec = **made;
  for (const std::size_t n : {std::size_t{1}, std::size_t{9}, std::size_t{5000}}) {
    CAPTURE(n);
    std::vector<float> e(n, 0.0F);
    Residual residual{e, {}};
    std::vector<double> sent(n, 0.0);
    std::vector<double> given(n, 0.0);
    for (int round = 0; round < 50; ++round) {
      const float alpha = round == 7 ? 0.5F : 1.0F;
      std::vector<float> g(n);
      std::vector<float> q(n);
      for (std::size_t i = 0; i < n; ++i) {
        g[i] = static_cast<float>((i * 7 + static_cast<std::size_t>(round) * 3) % 11) - 4.75F;
        if (round == 7) given[i] -= 0.5 * static_cast<double>(e[i]);
        q[i] = g[i] + alpha * e[i];
        given[i] += static_cast<double>(g[i]);
      }
      const CodecContext context{.alpha = alpha};
      std::vector<std::byte> payload(codec.MaxEncodedSize(n));
      std::vector<std::byte> plain(codec.MaxEncodedSize(n));
      REQUIRE(EncodeSpan(codec, g, context, residual, payload).ok());
      REQUIRE(EncodeSpan(codec, q, context, plain).ok());
      CHECK(payload == plain);
      std::vector<float> decoded(n);
      std::vector<float> added(n, 2.0F);
      REQUIRE(codec.Decode(payload, context, decoded).ok());
      REQUIRE(codec.DecodeAdd(payload, context, added).ok());
      bool is_right = true;
      for (std::size_t i = 0; i < n; ++i) {
        is_right = is_right && e[i] == q[i] - decoded[i] && added[i] == 2.0F + decoded[i];
        sent[i] += static_cast<double>(decoded[i]);
      }
      CHECK(is_right);
      if (round == 49) {
        const std::vector<float> before = e;
        codec.Undo(payload, context, residual);
        for (std::size_t i = 0; i < n; ++i) is_right = is_right && e[i] == before[i] + decoded[i];
        CHECK(is_right);
        e = before;
      }
    }
    // Sums of multiples of 1/16 and halved ones: errors of rounding only.
    for (std::size_t i = 0; i < n; ++i) {
      REQUIRE(std::abs(sent[i] + static_cast<double>(e[i]) - given[i]) < 1e-3);
    }
    CHECK(residual.is_explicit());
  }
}

TEST_CASE("a plug-in never sees values that are not finite", "[plugin]") {
  const InTest plugin;
  const auto codec = plugin.Make();
  behaviour.encode_fails = true;  // so a call would show
  const std::size_t n = 3;
  std::vector<std::byte> output(codec->MaxEncodedSize(n));
  const std::vector<float> g = {1.0F, kNan, kInf};
  auto encoded = EncodeSpan(*codec, g, {}, output);
  REQUIRE(encoded.ok());
  CHECK_FALSE(encoded->finite);
  std::vector<float> e = {0.5F, 0.25F, 8.0F};
  Residual residual{e, {}};
  encoded = EncodeSpan(*codec, g, {}, residual, output);
  REQUIRE(encoded.ok());
  CHECK_FALSE(encoded->finite);
  CHECK(e == std::vector<float>{1.5F, 0.25F, 8.0F});
}

TEST_CASE("units without elements do not reach a plug-in, and callers are checked", "[plugin]") {
  const InTest plugin;
  {
    const auto codec = plugin.Make();
    CHECK(behaviour.codecs == 1);
    behaviour.encode_fails = true;
    CHECK(codec->MaxEncodedSize(0) == 0);
    const auto encoded = EncodeSpan(*codec, {}, {}, {});
    REQUIRE(encoded.ok());
    CHECK(encoded->payload_bytes == 0);
    CHECK(codec->Validate({}, 0).ok());
    CHECK(codec->Decode({}, {}, {}).ok());
    const std::byte one[1] = {};
    CHECK(codec->Validate(one, 0).code() == StatusCode::kCorruptData);

    std::vector<std::byte> output(11);
    const std::vector<float> g(3);
    CHECK(EncodeSpan(*codec, g, {}, output).status().code() == StatusCode::kBufferTooSmall);
    output.resize(12);
    std::vector<float> e(2);
    Residual residual{e, {}};
    CHECK(EncodeSpan(*codec, g, {}, residual, output).status().code() ==
          StatusCode::kInvalidArgument);
  }
  CHECK(behaviour.codecs == 0);
}

TEST_CASE("what comes back from a plug-in is checked, and faults name library and compressor",
          "[plugin]") {
  const std::size_t n = 4;
  const std::vector<float> g = {1.0F, -2.0F, 3.0F, 0.25F};
  std::vector<float> e(n, 0.0F);
  Residual residual{e, {}};
  InTest plugin;
  const auto fault = [&](const Compressor& codec, bool feedback) {
    std::vector<std::byte> output(codec.MaxEncodedSize(n));
    const auto encoded =
        feedback ? EncodeSpan(codec, g, {}, residual, output) : EncodeSpan(codec, g, {}, output);
    REQUIRE_FALSE(encoded.ok());
    CHECK(encoded.status().code() == StatusCode::kInternal);
    CHECK(encoded.status().message().find("plug-in 'test.so', compressor mine: ") == 0);
    return encoded.status().message();
  };

  SECTION("a payload beyond its bound") {
    const auto codec = plugin.Make();
    behaviour.extra_bytes = 1;
    CHECK(Has(fault(*codec, false), "encode made 17 bytes of 4 elements, expected at most 16"));
  }
  SECTION("a payload smaller than a fixed size") {
    plugin.compressor.flags = GRADWIRE_FIXED_SIZE;
    const auto codec = plugin.Make();
    behaviour.extra_bytes = std::size_t{0} - 1;
    CHECK(Has(fault(*codec, false), "encode made 15 bytes of 4 elements, expected 16"));
    const std::vector<std::byte> payload(15);
    CHECK(codec->Validate(payload, n).message() ==
          "mine payload is 15 bytes, expected 16 for 4 elements");
  }
  SECTION("no size at all") {
    const auto codec = plugin.Make();
    behaviour.sets_no_size = true;
    CHECK(Has(fault(*codec, false), "encode made 17 bytes"));
  }
  SECTION("an error, whose text stays on its line and ends") {
    const auto codec = plugin.Make();
    behaviour.encode_fails = true;
    CHECK(Has(fault(*codec, false), "encode failed: no more\\npaper"));
    behaviour.endless_text = true;
    CHECK(Has(fault(*codec, false), "encode failed: xxxx"));
  }
  SECTION("values that are not finite") {
    const auto codec = plugin.Make();
    behaviour.decodes_nan = true;
    CHECK(Has(fault(*codec, true), "decode gave values that are not finite of a payload of its"));
    const std::vector<std::byte> payload(16);
    std::vector<float> output(n);
    for (const Status& status :
         {codec->Decode(payload, {}, output), codec->DecodeAdd(payload, {}, output)}) {
      CHECK(status.code() == StatusCode::kCorruptData);
      CHECK(Has(status.message(), "compressor mine: decode gave values that are not finite"));
    }
  }
  SECTION("payloads that it refuses, or that are beyond its bound") {
    const auto codec = plugin.Make();
    std::vector<std::byte> payload(15);
    std::vector<float> output(n);
    CHECK(codec->Decode(payload, {}, output) ==
          CorruptData("mine payload of 15 bytes for 4 elements: wrong size"));
    behaviour.accepts_all = true;
    payload.resize(17);
    CHECK(codec->Validate(payload, n) ==
          CorruptData("mine payload is 17 bytes, expected at most 16 for 4 elements"));
  }
  SECTION("a bound that cannot be right") {
    const auto registry = plugin.Register();
    REQUIRE(registry.ok());
    behaviour.extra_bound = std::numeric_limits<std::size_t>::max() / 2;
    const auto made = (*registry)->Create("mine");
    REQUIRE_FALSE(made.ok());
    CHECK(Has(made.status().message(), "max_encoded_size of 1 elements is 92233720368547758"));
    CHECK(behaviour.codecs == 0);
  }
}

// ---- Registration -------------------------------------------------------------------------------

TEST_CASE("a faulty description is refused by name", "[plugin]") {
  InTest plugin;
  SECTION("another ABI version") {
    plugin.plugin.abi_version = 99;
    CHECK(Has(plugin.Fault(), "plug-in 'test.so' has plug-in ABI version 99, this program has 1"));
  }
  SECTION("nothing") {
    const auto registry = RegisterPlugins({{"test.so", nullptr}});
    CHECK(Has(registry.status().message(), "gradwire_get_plugin returned nothing"));
    plugin.plugin.num_compressors = 0;
    CHECK(Has(plugin.Fault(), "has 0 compressors, expected 1 to 256"));
  }
  SECTION("a missing compressor") {
    plugin.list[0] = nullptr;
    CHECK(Has(plugin.Fault(), "has a faulty compressor 0: it is missing"));
  }
  SECTION("another size") {
    plugin.compressor.size = 8;
    CHECK(Has(plugin.Fault(), "says that its description is 8 bytes"));
  }
  SECTION("a missing function") {
    plugin.compressor.validate = nullptr;
    CHECK(Has(plugin.Fault(), "has a faulty compressor mine: it has no function validate"));
  }
  SECTION("no name and no version") {
    plugin.compressor.version = "two words";
    CHECK(Has(plugin.Fault(), "has the version 'two words', expected 1 to 64 printable"));
    plugin.compressor.version = "1";
    plugin.compressor.name = "a(b)";
    CHECK(Has(plugin.Fault(), "'a(b)' cannot be a compressor's name"));
    plugin.compressor.name = nullptr;
    CHECK(Has(plugin.Fault(), "'' cannot be a compressor's name"));
  }
  SECTION("a name that is taken") {
    const auto twice = RegisterPlugins({{"a.so", &plugin.plugin}, {"b.so", &plugin.plugin}});
    REQUIRE_FALSE(twice.ok());
    CHECK(twice.status().message() ==
          "plug-in 'b.so' has a compressor mine, but that name is taken by plug-in 'a.so'");
    plugin.compressor.name = "onebit";
    CHECK(plugin.Fault() ==
          "plug-in 'test.so' has a compressor onebit, but that name is taken by a built-in "
          "compressor");
  }
  SECTION("parameters") {
    gradwire_parameter_info parameter = {};
    plugin.compressor.num_parameters = 1;
    CHECK(Has(plugin.Fault(), "it has no list of its 1 parameters"));
    plugin.compressor.parameters = &parameter;
    CHECK(Has(plugin.Fault(), "it has a parameter '' without a printable name"));
    parameter.name = "p";
    parameter.kind = 9;
    CHECK(Has(plugin.Fault(), "it has a parameter 'p' of kind 9, expected 0 to 3"));
    parameter.kind = GRADWIRE_PARAMETER_CHOICE;
    CHECK(Has(plugin.Fault(), "it has a parameter 'p' without choices"));
    parameter.kind = GRADWIRE_PARAMETER_INTEGER;
    parameter.min = 2;
    parameter.max = 5;
    const auto registry = plugin.Register();
    REQUIRE(registry.ok());
    CHECK((*registry)->Create("mine").ok());
    CHECK((*registry)->Create("mine(p=5)").ok());
    CHECK(Has((*registry)->Create("mine(p=6)").status().message(),
              "p of compressor mine is '6', expected a whole number from 2 to 5"));
  }
}

TEST_CASE("numbers of compressors do not depend on the order of libraries", "[plugin]") {
  InTest a;
  InTest b;
  a.compressor.name = "alpha";
  b.compressor.name = "beta";
  for (const bool swapped : {false, true}) {
    const LoadedPlugin first{"a.so", swapped ? &b.plugin : &a.plugin};
    const LoadedPlugin second{"b.so", swapped ? &a.plugin : &b.plugin};
    const auto registry = RegisterPlugins({first, second});
    REQUIRE(registry.ok());
    CHECK((*registry)->Find("alpha")->wire_id == wire_id::kFirstPluginId);
    CHECK((*registry)->Find("beta")->wire_id == wire_id::kFirstPluginId + 1);
    CHECK(DescribePluginCompressors(**registry) == "[alpha 3, beta 3]");
  }
}

TEST_CASE("a library that is no plug-in is refused with the reason", "[plugin]") {
  CHECK(Has(LoadFault({"/nonexistent/a.so"}), "plug-in '/nonexistent/a.so' cannot be loaded: "));
  CHECK(Has(LoadFault({"nonexistent.so"}), "; a file here is named ./FILE"));
  const std::string text_file = std::string(GRADWIRE_SOURCE_DIR) + "/README.md";
  CHECK(Has(LoadFault({text_file}), "cannot be loaded: "));
  CHECK(Has(LoadFault({PathOf("libplugin_empty.so")}), "has no function gradwire_get_plugin: "));
  CHECK(Has(LoadFault({PathOf("libplugin_future.so")}),
            "has plug-in ABI version 2, this program has 1"));
  const std::string fixed = PathOf("libplugin_fixed.so");
  CHECK(
      Has(LoadFault({fixed, fixed}), "has a compressor fixed, but that name is taken by plug-in"));
}

// ---- The check that authors run -----------------------------------------------------------------

TEST_CASE("the check finds what is wrong with a codec", "[plugin]") {
  InTest plugin;
  const auto codec = plugin.Make();
  const auto finds = [&](const std::string& text) {
    const auto faults = CheckCodec(*codec);
    for (const std::string& fault : faults) {
      if (Has(fault, text)) return true;
    }
    UNSCOPED_INFO(faults.size() << " faults, the first: " << (faults.empty() ? "" : faults[0]));
    return false;
  };
  CHECK(CheckCodec(*codec) == std::vector<std::string>{});
  behaviour = {};
  behaviour.decodes_ones = true;
  CHECK(finds("zeros do not decode to zeros"));
  CHECK(finds("its class is exact, but what it decodes differs"));
  behaviour = {};
  behaviour.least_scribble = 100;
  CHECK(finds("with 127 elements: zeros: encode writes beyond the 508 bytes of max_encoded_size"));
  behaviour = {};
  behaviour.draws = true;
  CHECK(finds("encoding them again gives other bytes"));
  behaviour = {};
  behaviour.decodes_nan = true;
  CHECK(finds("decode gave values that are not finite"));
  behaviour = {};
}

// ---- The configuration --------------------------------------------------------------------------

Result<ProcessConfig> Load(const Environment& environment, std::vector<std::string> assignments) {
  ProcessOptions options;
  options.assignments = std::move(assignments);
  return LoadProcessConfig(options, environment);
}

TEST_CASE("plug-ins may be named in a file, a variable or on the command line",
          "[plugin][config]") {
  const std::string list = fmt::format("[{}]", PathOf("libplugin_fixed.so"));
  const std::string direction =
      "compression: {uplink: {compressor: fixed, bits: 4}, rules: "
      "[{match: a, compressor: fixed}]}\n";
  // Compressors may be named before the plug-in in any layer.
  const auto parsed = ParseConfig(direction + "plugins: " + list, "job.yaml");
  INFO(parsed.status().message());
  REQUIRE(parsed.ok());
  CHECK(parsed->plugins.paths == std::vector<std::string>{PathOf("libplugin_fixed.so")});
  CHECK(parsed->compressors().Find("fixed") != nullptr);
  CHECK(SharedConfig(*parsed).at("plugins") == "[fixed 1]");
  CHECK(SharedConfig(Config()).at("plugins") == "[]");

  const auto variable =
      Load({{"GRADWIRE_PLUGINS", list}}, {"compression.uplink.compressor=fixed(bits=4)"});
  INFO(variable.status().message());
  REQUIRE(variable.ok());
  CHECK(variable->sources.at("plugins") == "GRADWIRE_PLUGINS");
  CHECK(variable->config.plugins == parsed->plugins);
  // The command line counts, and what it overrules is not loaded.
  const auto both = Load({{"GRADWIRE_PLUGINS", "[/nonexistent.so]"},
                          {"GRADWIRE_COMPRESSION_DOWNLINK_COMPRESSOR", "fixed"}},
                         {"plugins=[x.so]", "plugins=" + list});
  INFO(both.status().message());
  REQUIRE(both.ok());
  CHECK(both->sources.at("plugins") == "--set plugins");
  CHECK(both->config.compression.downlink.compressor.name == "fixed");

  // A file under such a layer: its own list is not looked at, all else is as it says.
  const auto under = ParseConfig("plugins: [/nonexistent.so]\n" + direction, "job.yaml", nullptr,
                                 &parsed->plugins);
  INFO(under.status().message());
  REQUIRE(under.ok());
  CHECK(*under == *parsed);
}

TEST_CASE("a wrong list of plug-ins is refused with the key", "[plugin][config]") {
  const auto refusal = [](const std::string& yaml) {
    const auto config = ParseConfig(yaml, "job.yaml");
    REQUIRE_FALSE(config.ok());
    return config.status().message();
  };
  CHECK(refusal("plugins: a.so") ==
        "job.yaml:1: plugins is 'a.so', expected a list of shared libraries such as "
        "[./libmine.so]");
  CHECK(refusal("plugins: [[a]]") ==
        "job.yaml:1: plugins has the item a list, expected the path of a shared library");
  CHECK(refusal("plugins: [/nonexistent/a.so]")
            .find("job.yaml:1: plugins has a fault: plug-in '/nonexistent/a.so' cannot be") == 0);
  CHECK(
      Has(refusal("compression: {uplink: {compressor: fixed}}"), "no compressor is named 'fixed'"));
  Config config;
  const std::string list = fmt::format("plugins=[{}]", PathOf("libplugin_fixed.so"));
  REQUIRE(ApplyAssignments({list, "compression.uplink.compressor=fixed"}, config).ok());
  // A compressor that is in use cannot be taken away.
  CHECK(Has(ApplyAssignment("plugins=[]", config).message(),
            "compression.uplink.compressor is 'fixed': no compressor is named 'fixed'"));
}

}  // namespace
}  // namespace gradwire
