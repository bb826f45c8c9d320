// A worker that does what its arguments say, one after the other, and prints it: for tests of what
// happens when workers do not do the same.
//
//   [RANKS:][?]ACTION   RANKS: only there ("1:", "0,2:").  ?: must fail, and then goes on.
//
//   set=KEY=VALUE  rank=N                         before connect
//   connect
//   declare=NAME:ELEMENTS:DTYPE:OP[,...]          together
//   push=NAME  push_short=NAME  push_unknown      wait=NAME  end_step
//   broadcast=NAME:BYTES:ROOT  barrier
//   sleep_ms=N  close  drop (the client, without close)  exit=CODE
//
// The first failure ends it with the exit code that belongs to it.

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "common/base/log.h"
#include "common/base/malloc.h"
#include "common/config/config.h"
#include "common/config/process.h"
#include "worker/client/client.h"

namespace gradwire {
namespace {

std::vector<std::string> Split(const std::string& text, char by) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == by) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

Result<std::uint64_t> Number(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) {
    return InvalidArgument(fmt::format("'{}' is no number", text));
  }
  return value;
}

class ScriptedWorker {
 public:
  Status Begin() {
    const auto environment = GradwireEnvironment();
    GRADWIRE_RETURN_IF_ERROR(ApplyEnvironment(environment, config_));
    const auto rank = environment.find("GRADWIRE_RANK");
    if (rank == environment.end()) return InvalidArgument("GRADWIRE_RANK is not set");
    const auto number = Number(rank->second);
    if (!number.ok()) return number.status();
    place_ = rank_ = static_cast<std::uint32_t>(*number);
    InitLog(config_.log.level, config_.log.format, fmt::format("worker/{}", rank_));
    return Status::Ok();
  }

  /// Whether the process shall end, and with what.
  std::optional<int> Run(std::string word) {
    const std::size_t colon = word.find(':');
    if (colon != std::string::npos && word.find_first_not_of("0123456789,") == colon) {
      bool here = false;
      for (const std::string& rank : Split(word.substr(0, colon), ',')) {
        here |= rank == std::to_string(place_);
      }
      if (!here) return std::nullopt;
      word.erase(0, colon + 1);
    }
    const bool must_fail = word.starts_with('?');
    if (must_fail) word.erase(0, 1);
    std::cout << word << std::endl;
    const std::size_t equals = word.find('=');
    const std::string verb = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (verb == "exit") return std::atoi(value.c_str());
    const Status status = Do(verb, value);
    if (must_fail) {
      std::cout << "refused: " << status.ToString() << std::endl;
      if (!status.ok()) return std::nullopt;
      std::cerr << word << " was not refused\n";
      return kExitFailed;
    }
    if (status.ok()) {
      std::cout << "done " << word << std::endl;
      return std::nullopt;
    }
    std::cerr << word << ": " << status.ToString() << std::endl;
    return ExitCodeOf(status, connected_);
  }

 private:
  struct Memory {
    TensorId id;
    std::vector<std::byte> input;
    std::vector<std::byte> output;
    Handle handle;
  };

  Status Do(const std::string& verb, const std::string& value) {
    if (verb == "set") return ApplyAssignment(value, config_);
    if (verb == "sleep_ms" || verb == "rank") {
      const auto number = Number(value);
      if (!number.ok()) return number.status();
      if (verb == "rank") {
        rank_ = static_cast<std::uint32_t>(*number);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(*number));
      }
      return Status::Ok();
    }
    if (verb == "connect") {
      auto client = Client::Connect(config_, rank_);
      if (!client.ok()) return client.status();
      client_ = std::move(client).value();
      connected_ = true;
      return Status::Ok();
    }
    if (client_ == nullptr) return InvalidArgument("not connected");
    if (verb == "declare") return Declare(value);
    if (verb == "broadcast") {
      const auto parts = Split(value, ':');
      if (parts.size() != 3) return InvalidArgument("expected NAME:BYTES:ROOT");
      const auto bytes = Number(parts[1]);
      const auto root = Number(parts[2]);
      if (!bytes.ok() || !root.ok()) return InvalidArgument("expected NAME:BYTES:ROOT");
      std::vector<std::byte> data(*bytes);
      return client_->Broadcast(parts[0], data, static_cast<std::uint32_t>(*root));
    }
    if (verb == "barrier") return client_->Barrier();
    if (verb == "end_step") return client_->EndStep();
    if (verb == "close") return client_->Close();
    if (verb == "drop") {
      client_ = nullptr;
      return Status::Ok();
    }
    std::vector<std::byte> none;
    if (verb == "push_unknown") {
      return client_->PushPullAsync(TensorId{12345}, none, none).status();
    }
    const auto found = tensors_.find(value);
    if (found == tensors_.end()) return InvalidArgument(fmt::format("no tensor '{}'", value));
    Memory& memory = found->second;
    if (verb == "push_short") {
      return client_
          ->PushPullAsync(memory.id, ByteView(memory.input).first(memory.input.size() - 4),
                          memory.output)
          .status();
    }
    if (verb == "push") {
      const auto handle = client_->PushPullAsync(memory.id, memory.input, memory.output);
      if (handle.ok()) memory.handle = *handle;
      return handle.status();
    }
    if (verb == "wait") return client_->Wait(memory.handle);
    return InvalidArgument(fmt::format("no action '{}'", verb));
  }

  Status Declare(const std::string& list) {
    std::vector<TensorDeclaration> batch;
    for (const std::string& text : Split(list, ',')) {
      const auto parts = Split(text, ':');
      if (parts.size() != 4) return InvalidArgument("expected NAME:ELEMENTS:DTYPE:OP");
      TensorDeclaration tensor;
      tensor.name = parts[0];
      const auto elements = Number(parts[1]);
      const auto dtype = ParseDType(parts[2]);
      if (!elements.ok()) return elements.status();
      if (!dtype.ok()) return dtype.status();
      tensor.shape = {*elements};
      tensor.dtype = *dtype;
      tensor.op = parts[3] == "sum" ? ReduceOp::kSum : ReduceOp::kAverage;
      batch.push_back(std::move(tensor));
    }
    const auto ids = client_->Declare(batch);
    if (!ids.ok()) return ids.status();
    for (std::size_t i = 0; i < batch.size(); ++i) {
      Memory& memory = tensors_[batch[i].name];
      memory.id = (*ids)[i];
      memory.input.resize(batch[i].num_elements() * SizeOf(batch[i].dtype));
      memory.output.resize(memory.input.size());
    }
    return Status::Ok();
  }

  Config config_;
  std::uint32_t place_ = 0;  // the rank that was given, whatever it says to the servers
  std::uint32_t rank_ = 0;
  std::map<std::string, Memory> tensors_;  // outlives the client
  std::unique_ptr<Client> client_;
  bool connected_ = false;
};

int Run(int argc, char** argv) {
  ScriptedWorker worker;
  if (const Status status = worker.Begin(); !status.ok()) {
    std::cerr << status.ToString() << "\n";
    return kExitUsage;
  }
  for (int i = 1; i < argc; ++i) {
    if (const auto code = worker.Run(argv[i])) return *code;
  }
  return kExitOk;
}

}  // namespace
}  // namespace gradwire

int main(int argc, char** argv) {
  gradwire::KeepMessageMemory();
  const int code = gradwire::Run(argc, argv);
  std::cout << "exit " << code << std::endl;
  return code;
}
