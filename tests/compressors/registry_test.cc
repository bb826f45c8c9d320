#include "compressors/registry.h"

#include "compressors/compression_rules.h"
#include "compressors/wire_ids.h"
#include "tests/catch.h"

namespace gradwire {
namespace {

bool Mentions(const Status& status, std::string_view text) {
  return status.message().find(text) != std::string::npos;
}

TEST_CASE("a spec's written form parses back to itself", "[compressors][registry]") {
  const CompressorSpec spec{"topk", {{"ratio", "0.010"}, {"index", "u32"}}};
  CHECK(ToString(spec) == "topk(index=u32,ratio=0.010)");
  CHECK(*ParseCompressorSpec("topk(index=u32,ratio=0.010)") == spec);
  // Parameters are sorted: one text for one spec.
  CHECK(ToString(*ParseCompressorSpec("topk(ratio=0.010,index=u32)")) ==
        "topk(index=u32,ratio=0.010)");
  CHECK(ToString(CompressorSpec{}) == "none");
  CHECK(*ParseCompressorSpec("none") == CompressorSpec{});
}

TEST_CASE("text that is not a spec is refused with the text", "[compressors][registry]") {
  for (const std::string text :
       {"", "topk(", "topk()", "topk)", "topk(ratio)", "topk(=1)", "topk(ratio=)", "(ratio=1)",
        "topk(ratio=1", "topk(ratio=1)x", "topk(a=1,)", "topk(a=1,,b=2)", "topk(a=(1))", "top k",
        "topk(a= 1)", "topk(a=1=2)", "topk(a=1,a=2)"}) {
    CAPTURE(text);
    const Status status = ParseCompressorSpec(text).status();
    CHECK(status.code() == StatusCode::kInvalidArgument);
    CHECK(Mentions(status, "'" + text + "'"));
    CHECK_FALSE(BuiltinCompressors().Create(text).ok());
  }
}

TEST_CASE("an unknown compressor or parameter is an error with the nearest name",
          "[compressors][registry]") {
  const CompressorRegistry& registry = BuiltinCompressors();
  Status status = registry.Create("topkk(ratio=0.1)").status();
  CHECK(status.code() == StatusCode::kNotFound);
  CHECK(Mentions(status, "'topkk'"));
  CHECK(Mentions(status, "did you mean 'topk'"));
  status = registry.Create("onebit(scalling=l1)").status();
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK(Mentions(status, "did you mean 'scaling'"));
  status = registry.Create("none(ratio=1)").status();
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK(Mentions(status, "'ratio'"));
}

TEST_CASE("a parameter that does not parse or is out of range is an error with text and range",
          "[compressors][registry]") {
  const CompressorRegistry& registry = BuiltinCompressors();
  const auto refused = [&](const std::string& spec, std::string_view text, std::string_view what) {
    const Status status = registry.Create(spec).status();
    CAPTURE(spec, status.ToString());
    CHECK(status.code() == StatusCode::kInvalidArgument);
    CHECK(Mentions(status, text));
    CHECK(Mentions(status, what));
  };
  refused("topk(ratio=2)", "'2'", "to 1");
  refused("topk(ratio=0)", "'0'", "to 1");
  refused("topk(ratio=nan)", "'nan'", "to 1");
  refused("topk(ratio=0.1x)", "'0.1x'", "to 1");
  refused("topk(k=0)", "'0'", "from 1 to 4294967295");
  refused("topk(k=-1)", "'-1'", "from 1");
  refused("topk(k=1.5)", "'1.5'", "whole number");
  refused("topk(k=99999999999999999999)", "'99999999999999999999'", "whole number");
  refused("topk(value=fp8)", "'fp8'", "fp16, fp32");
  refused("topk(k=3,ratio=0.1)", "ratio and k", "one of them");
  refused("onebit(block=1000)", "1000", "multiple of 4096");
  refused("onebit(scaling=L1)", "'L1'", "l1, l2, two_means, none");
}

CompressorInfo FakeCompressor(std::string name, std::uint16_t id) {
  CompressorInfo info;
  info.name = std::move(name);
  info.wire_id = id;
  info.create = [](const Parameters&) -> Result<std::unique_ptr<const Compressor>> {
    return Internal("not to be made");
  };
  return info;
}

TEST_CASE("a name or a wire id can be taken once", "[compressors][registry]") {
  CompressorRegistry registry;
  REQUIRE(registry.Register(FakeCompressor("mine", 40000)).ok());
  CHECK(registry.Register(FakeCompressor("mine", 40001)).code() == StatusCode::kInvalidArgument);
  const Status status = registry.Register(FakeCompressor("other", 40000));
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK(Mentions(status, "mine"));
  CHECK_FALSE(registry.Register(FakeCompressor("zero", 0)).ok());
  CHECK_FALSE(registry.Register(FakeCompressor("", 7)).ok());
  CHECK_FALSE(registry.Register(FakeCompressor("a(b", 7)).ok());
  CHECK(registry.entries().size() == 1);
  CHECK(registry.Create("mine").status().code() == StatusCode::kInternal);
  CHECK(CompressorRegistry().Create("none").status().code() == StatusCode::kNotFound);
}

TEST_CASE("defaults are filled in, and every kind of parameter can be read",
          "[compressors][registry]") {
  CompressorRegistry registry;
  CompressorInfo info = FakeCompressor("mine", 40000);
  using Kind = ParameterInfo::Kind;
  info.parameters = {{"number", Kind::kNumber, "0.25", 0, 1, {}, ""},
                     {"whole", Kind::kInteger, "7", 0, 1e18, {}, ""},
                     {"flag", Kind::kBool, "false", 0, 0, {}, ""},
                     {"choice", Kind::kChoice, "a", 0, 0, {"a", "b"}, ""},
                     {"optional", Kind::kNumber, "", 0, 1, {}, ""}};
  std::string seen;
  info.create = [&](const Parameters& p) -> Result<std::unique_ptr<const Compressor>> {
    seen = std::to_string(p.Number("number")) + " " + std::to_string(p.Integer("whole")) + " " +
           (p.Bool("flag") ? "true" : "false") + " " + p.Text("choice") + " " +
           (p.Has("optional") ? "has" : "has not");
    return Internal("");
  };
  REQUIRE(registry.Register(info).ok());
  CHECK_FALSE(registry.Create("mine").ok());
  CHECK(seen == "0.250000 7 false a has not");
  CHECK_FALSE(registry.Create("mine(choice=b,flag=true,optional=1,whole=900)").ok());
  CHECK(seen == "0.250000 900 true b has");
  seen.clear();
  CHECK(registry.Create("mine(flag=yes)").status().code() == StatusCode::kInvalidArgument);
  CHECK(seen.empty());
}

TEST_CASE("built-in wire ids are below those of plug-ins and the next free one",
          "[compressors][registry]") {
  CHECK(BuiltinCompressors().entries().size() == 12);
  for (const CompressorInfo& info : BuiltinCompressors().entries()) {
    CHECK(info.wire_id < wire_id::kNextWireId);
    CHECK(BuiltinCompressors().Find(info.name) == &info);
  }
  CHECK(BuiltinCompressors().Find("nothing") == nullptr);
  // What payloads of running jobs and saved plans are read by.
  CHECK(BuiltinCompressors().Find("none")->wire_id == 1);
  CHECK(BuiltinCompressors().Find("fp16")->wire_id == 2);
  CHECK(BuiltinCompressors().Find("bf16")->wire_id == 3);
  CHECK(BuiltinCompressors().Find("onebit")->wire_id == 4);
  CHECK(BuiltinCompressors().Find("topk")->wire_id == 5);
  CHECK(BuiltinCompressors().Find("int8")->wire_id == 6);
  CHECK(BuiltinCompressors().Find("dithering")->wire_id == 8);
  CHECK(BuiltinCompressors().Find("natural")->wire_id == 9);
  CHECK(BuiltinCompressors().Find("terngrad")->wire_id == 10);
  CHECK(BuiltinCompressors().Find("twobit")->wire_id == 11);
}

TEST_CASE("patterns match as in a shell", "[compressors][rules]") {
  CHECK(MatchesPattern("*", ""));
  CHECK(MatchesPattern("*", "anything"));
  CHECK(MatchesPattern("", ""));
  CHECK_FALSE(MatchesPattern("", "a"));
  CHECK(MatchesPattern("*.bias", "layer1.0.bias"));
  CHECK_FALSE(MatchesPattern("*.bias", "layer1.0.bias2"));
  CHECK_FALSE(MatchesPattern("*.bias", "bias"));
  CHECK(MatchesPattern("embed*", "embedding.weight"));
  CHECK_FALSE(MatchesPattern("embed*", "my_embed"));
  CHECK(MatchesPattern("a?c", "abc"));
  CHECK_FALSE(MatchesPattern("a?c", "ac"));
  CHECK(MatchesPattern("*a*b*", "xxaxxbxx"));
  CHECK_FALSE(MatchesPattern("*a*b*", "xxbxxaxx"));
  CHECK(MatchesPattern("a*b*ab", "ab_ab_ab"));
  CHECK(MatchesPattern("exact", "exact"));
  CHECK_FALSE(MatchesPattern("exact", "exactly"));
  CHECK(MatchesPattern("layer?.*", "layer1.weight"));
  // No blow-up with many stars.
  CHECK_FALSE(MatchesPattern("*a*a*a*a*a*a*a*a*b", std::string(2000, 'a')));
}

}  // namespace
}  // namespace gradwire
