#include "server/refusals.h"

#include <fmt/format.h>

namespace gradwire {
namespace {

struct Counter {
  const char* name;
  std::uint64_t RefusalCounters::*member;
};
constexpr Counter kCounters[] = {
    {"unknown_peer", &RefusalCounters::unknown_peer},
    {"bad_hello", &RefusalCounters::bad_hello},
    {"other_version", &RefusalCounters::other_version},
    {"foreign_job", &RefusalCounters::foreign_job},
    {"out_of_range", &RefusalCounters::out_of_range},
    {"not_accepted", &RefusalCounters::not_accepted},
    {"out_of_place", &RefusalCounters::out_of_place},
};

}  // namespace

RefusalCounters& RefusalCounters::operator+=(const RefusalCounters& other) {
  for (const Counter& counter : kCounters) this->*counter.member += other.*counter.member;
  return *this;
}

std::uint64_t RefusalCounters::total() const {
  std::uint64_t sum = 0;
  for (const Counter& counter : kCounters) sum += this->*counter.member;
  return sum;
}

std::string RefusalCounters::Describe() const {
  std::string text;
  for (const Counter& counter : kCounters) {
    if (this->*counter.member == 0) continue;
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", counter.name, this->*counter.member);
  }
  return text;
}

}  // namespace gradwire
