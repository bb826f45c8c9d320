#include <fstream>
#include <iterator>
#include <string>

#include "compressors/registry.h"
#include "tests/catch.h"

// A compressor that nobody describes or checks is not finished.

namespace gradwire {
namespace {

std::string ReadText(const std::string& path) {
  std::ifstream file(std::string(GRADWIRE_SOURCE_DIR) + "/" + path);
  CAPTURE(path);
  REQUIRE(file.good());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE(
    "every compressor is in the table, the payloads' page, the reference and the accuracy table",
    "[compressors][docs]") {
  const std::string table = ReadText("docs/compressors.md");
  const std::string payloads = ReadText("docs/payloads.md");
  const std::string reference = ReadText("scripts/reference_codecs.py");
  const std::string accuracy = ReadText("docs/results/accuracy_table.md");
  for (const CompressorInfo& info : BuiltinCompressors().entries()) {
    CAPTURE(info.name);
    CHECK(Contains(table, "\n| `" + info.name + "` |"));
    const bool has_section = Contains(payloads, "## " + info.name + "\n") ||
                             Contains(payloads, "## " + info.name + "(") ||
                             Contains(payloads, "## " + info.name + ",") ||
                             Contains(payloads, ", " + info.name + "\n") ||
                             Contains(payloads, ", " + info.name + ",");
    CHECK(has_section);
    CHECK(Contains(reference, "\"" + info.name + "\": "));
    const bool has_accuracy = Contains(accuracy, "\n| `" + info.name + "` |") ||
                              Contains(accuracy, "\n| `" + info.name + "(");
    CHECK(has_accuracy);
    for (const ParameterInfo& parameter : info.parameters) {
      CAPTURE(parameter.name);
      CHECK_FALSE(parameter.description.empty());
      const std::size_t row = table.find("\n| `" + info.name + "` |");
      if (row == std::string::npos) continue;
      CHECK(Contains(table.substr(row + 1, table.find('\n', row + 1) - row), parameter.name));
    }
  }
}

}  // namespace
}  // namespace gradwire
