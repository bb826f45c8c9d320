#include "common/plan/model_list.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

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

TEST_CASE("every model list in configs has the published model's tensors and parameters",
          "[plan][unit]") {
  struct Published {
    std::string file;
    std::size_t tensors;
    std::uint64_t parameters;
    std::string first;
    std::string last;
  };
  // BERT: 110 M parameters in the paper, which rounds and counts the pooler.
  const Published models[] = {
      {"bert_base.txt", 199, 109482240, "embeddings.word_embeddings.weight", "pooler.dense.bias"},
      {"gpt2_small.txt", 148, 124439808, "wte.weight", "ln_f.bias"},
      {"resnet50.txt", 161, 25557032, "conv1.weight", "fc.bias"},
      {"vgg16.txt", 32, 138357544, "features.0.weight", "classifier.6.bias"},
  };
  std::set<std::string> files;
  const std::string folder = std::string(GRADWIRE_SOURCE_DIR) + "/configs/models";
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files.insert(entry.path().filename().string());
  }
  CHECK(files.size() == std::size(models));
  for (const Published& model : models) {
    CAPTURE(model.file);
    const auto tensors = ReadModelList(folder + "/" + model.file);
    INFO(tensors.status().ToString());
    REQUIRE(tensors.ok());
    std::uint64_t elements = 0;
    std::set<std::string> names;
    for (const TensorDeclaration& tensor : *tensors) {
      elements += tensor.num_elements();
      names.insert(tensor.name);
    }
    CHECK(tensors->size() == model.tensors);
    CHECK(names.size() == model.tensors);
    CHECK(elements == model.parameters);
    CHECK(tensors->front().name == model.first);
    CHECK(tensors->back().name == model.last);
  }
}

}  // namespace
}  // namespace gradwire
