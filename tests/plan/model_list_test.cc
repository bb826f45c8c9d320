#include "common/plan/model_list.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/catch.h"

namespace gradwire {
namespace {

/// A file that is gone at the end.
class TextFile {
 public:
  explicit TextFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              ("model_list_test_" + std::to_string(getpid()) + ".txt")) {
    std::ofstream(path_) << text;
  }
  ~TextFile() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

TEST_CASE("a model list gives tensors in order, the first with the highest priority",
          "[plan][unit]") {
  const TextFile file("# a model\n\nfirst.weight 3 4 # input\n  first.bias 4\nscale\n");
  const auto tensors = ReadModelList(file.path());
  INFO(tensors.status().ToString());
  REQUIRE(tensors.ok());
  REQUIRE(tensors->size() == 3);
  CHECK((*tensors)[0].name == "first.weight");
  CHECK((*tensors)[0].shape == std::vector<std::uint64_t>{3, 4});
  CHECK((*tensors)[1].num_elements() == 4);
  CHECK((*tensors)[2].num_elements() == 1);
  CHECK((*tensors)[0].priority > (*tensors)[1].priority);
  CHECK((*tensors)[1].priority > (*tensors)[2].priority);
}

TEST_CASE("a model list that is wrong is refused with file and line", "[plan][unit]") {
  for (const std::string bad : {"0", "-1", "3x", "18446744073709551616", "1.5"}) {
    const TextFile file("w 2\nb " + bad + "\n");
    const Status status = ReadModelList(file.path()).status();
    CAPTURE(bad, status.ToString());
    CHECK(status.code() == StatusCode::kInvalidArgument);
    CHECK(status.message().find(file.path() + ":2: extent of 'b' is '" + bad + "'") !=
          std::string::npos);
  }
  const TextFile empty("# nothing\n");
  CHECK(ReadModelList(empty.path()).status().code() == StatusCode::kInvalidArgument);
  const Status missing = ReadModelList("/no/such/list").status();
  CHECK(missing.code() == StatusCode::kNotFound);
  CHECK(missing.message().find("No such file") != std::string::npos);
}

TEST_CASE("every model list in configs is read", "[plan][unit]") {
  int lists = 0;
  const std::string folder = std::string(GRADWIRE_SOURCE_DIR) + "/configs/models";
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const auto tensors = ReadModelList(entry.path().string());
    CAPTURE(entry.path().string());
    INFO(tensors.status().ToString());
    REQUIRE(tensors.ok());
    std::uint64_t elements = 0;
    for (const TensorDeclaration& tensor : *tensors) elements += tensor.num_elements();
    if (entry.path().filename() == "bert_base.txt") {
      // 110 M parameters in the paper, which rounds and counts the pooler.
      CHECK(tensors->size() == 199);
      CHECK(elements == 109482240);
    }
    ++lists;
  }
  CHECK(lists >= 1);
}

}  // namespace
}  // namespace gradwire
