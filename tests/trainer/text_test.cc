#include "worker/trainer/text.h"

#include <filesystem>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/trainer/files.h"

namespace gradwire::trainer {
namespace {

std::vector<std::byte> Bytes(const std::string& text) {
  std::vector<std::byte> bytes;
  for (const char c : text) bytes.push_back(static_cast<std::byte>(c));
  return bytes;
}

/// The characters of a text again, given those that occur in their order.
std::string Spell(const Text& text, const std::string& alphabet) {
  std::string spelled;
  std::vector<float> sample(text.sample_size());
  text.Read(0, sample);
  for (const float number : sample) spelled += alphabet[static_cast<std::size_t>(number)];
  for (std::size_t i = 0; i < text.size(); ++i) spelled += alphabet[text.label(i)];
  return spelled;
}

TEST_CASE("a text is read file by file in the order of names, the last tenth of each for the test",
          "[trainer][text]") {
  const TempFolder folder;
  const std::string b(27, 'b');
  const std::string a(100, 'a');
  // Written in the other order; the last tenth of "1" is 'xyz', of "2" ten times 'a'.
  WriteFile(folder / "2", Bytes(a));
  WriteFile(folder / "1", Bytes(b + "xyz"));
  std::filesystem::create_symlink("1", folder / "0");
  std::filesystem::create_directory(folder / "3");
  WriteFile(folder / "4", {});
  const std::string alphabet = "abxyz";

  const auto train = LoadText(folder.path(), Split::kTrain, 0);
  REQUIRE(train.ok());
  CHECK(train->shape().classes == 5);  // with those that only the test has
  CHECK(train->sample_size() == kTextContext);
  CHECK(train->size() == 27 + 90 - kTextContext);
  CHECK(Spell(*train, alphabet) == std::string(27, 'b') + std::string(90, 'a'));

  CHECK(LoadText(folder.path(), Split::kTest, 0).status().code() == StatusCode::kCorruptData);
  WriteFile(folder / "4", Bytes(std::string(40, 'b')));
  const auto test = LoadText(folder.path(), Split::kTest, 0);
  REQUIRE(test.ok());
  CHECK(test->shape().classes == 5);
  CHECK(test->size() == 1);
  CHECK(Spell(*test, alphabet) == "xyzaaaaaaaaaabbbb");
}

TEST_CASE("a sample is the characters before its label", "[trainer][text]") {
  std::vector<std::uint8_t> numbers;
  for (std::uint8_t n = 0; n < 20; ++n) numbers.push_back(n);
  const Text text(numbers, 20, 0);
  REQUIRE(text.size() == 4);
  std::vector<float> sample(kTextContext);
  for (std::size_t i = 0; i < text.size(); ++i) {
    text.Read(i, sample);
    for (std::size_t k = 0; k < kTextContext; ++k) CHECK(sample[k] == static_cast<float>(i + k));
    CHECK(text.label(i) == i + kTextContext);
  }
  CHECK(Text(numbers, 20, 3).size() == 3);
  CHECK(Text(numbers, 20, 5).size() == 4);
  CHECK(Text({1, 2, 3}, 4, 0).size() == 0);
}

TEST_CASE("all 256 characters are told apart", "[trainer][text]") {
  const TempFolder folder;
  std::vector<std::byte> bytes;
  for (int i = 0; i < 1024; ++i) bytes.push_back(static_cast<std::byte>(i));
  WriteFile(folder / "all", bytes);
  const auto train = LoadText(folder.path(), Split::kTrain, 0);
  REQUIRE(train.ok());
  CHECK(train->shape().classes == 256);
  CHECK(train->label(255 - kTextContext) == 255);
}

TEST_CASE("missing texts are an error that names the folder and the Debian package",
          "[trainer][text]") {
  const TempFolder folder;
  for (const std::string& path : {folder.path(), folder / "none"}) {
    const auto text = LoadText(path, Split::kTrain, 0);
    CAPTURE(text.status().message());
    CHECK(text.status().code() == StatusCode::kNotFound);
    CHECK(text.status().message().find(path) != std::string::npos);
    CHECK(text.status().message().find("base-files") != std::string::npos);
  }
  WriteFile(folder / "short", Bytes("sixteen letters."));
  CHECK(LoadText(folder.path(), Split::kTrain, 0).status().code() == StatusCode::kCorruptData);
}

}  // namespace
}  // namespace gradwire::trainer
