#include "tests/fuzz/fuzz_target.h"

#include <cstdlib>
#include <iostream>

namespace gradwire::fuzz {

void Fail(std::string_view what) {
  std::cout << std::flush;
  std::cerr << "broken rule: " << what << std::endl;
  std::abort();
}

}  // namespace gradwire::fuzz
