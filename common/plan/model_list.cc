#include "common/plan/model_list.h"

#include <fmt/format.h>

#include <cerrno>
#include <charconv>
#include <fstream>
#include <sstream>
#include <system_error>

namespace gradwire {

Result<std::vector<TensorDeclaration>> ReadModelList(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return NotFound(fmt::format("cannot read model list '{}': {}", path,
                                std::generic_category().message(errno)));
  }
  std::vector<TensorDeclaration> tensors;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    std::istringstream words(line.substr(0, line.find('#')));
    TensorDeclaration tensor;
    if (!(words >> tensor.name)) continue;
    for (std::string word; words >> word;) {
      std::uint64_t extent = 0;
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), extent);
      if (error != std::errc() || end != word.data() + word.size() || extent == 0) {
        return InvalidArgument(
            fmt::format("{}:{}: extent of '{}' is '{}', expected a whole number from 1", path,
                        number, tensor.name, word));
      }
      tensor.shape.push_back(extent);
    }
    tensor.priority = -static_cast<std::int32_t>(tensors.size());
    tensors.push_back(std::move(tensor));
  }
  if (file.bad()) return InvalidArgument(fmt::format("cannot read model list '{}'", path));
  if (tensors.empty()) {
    return InvalidArgument(fmt::format("model list '{}' has no tensors", path));
  }
  return tensors;
}

}  // namespace gradwire
