// What bare ZeroMQ does with the benchmark's bytes: a ROUTER that sends every message back and
// DEALERs that keep a window of them under way. No compression, no sums, no protocol.

#include <fmt/format.h>
#include <zmq.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "common/base/malloc.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kHeaderBytes = 32;

void Free(void*, void*) {}

int Serve(const std::string& address, int workers) {
  void* const context = zmq_ctx_new();
  void* const socket = zmq_socket(context, ZMQ_ROUTER);
  const int zero = 0;
  zmq_setsockopt(socket, ZMQ_RCVHWM, &zero, sizeof zero);
  zmq_setsockopt(socket, ZMQ_SNDHWM, &zero, sizeof zero);
  zmq_setsockopt(socket, ZMQ_LINGER, &zero, sizeof zero);
  if (zmq_bind(socket, address.c_str()) != 0) {
    std::cerr << "bind " << address << ": " << zmq_strerror(zmq_errno()) << "\n";
    return 1;
  }
  // An empty last frame is a goodbye.
  for (int left = workers; left > 0;) {
    zmq_msg_t part;
    bool more = true;
    bool goodbye = false;
    while (more) {
      zmq_msg_init(&part);
      if (zmq_msg_recv(&part, socket, 0) < 0) return 1;
      more = zmq_msg_more(&part) != 0;
      goodbye = !more && zmq_msg_size(&part) == 0;
      if (zmq_msg_send(&part, socket, more ? ZMQ_SNDMORE : 0) < 0) return 1;
    }
    if (goodbye) --left;
  }
  const int linger = 1000;
  zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
  zmq_close(socket);
  zmq_ctx_term(context);
  return 0;
}

int Work(const std::string& address, std::size_t tensors, std::size_t tensor_bytes,
         std::size_t unit_bytes, std::size_t window_bytes, int rounds, int warm_up) {
  void* const context = zmq_ctx_new();
  void* const socket = zmq_socket(context, ZMQ_DEALER);
  const int zero = 0;
  zmq_setsockopt(socket, ZMQ_RCVHWM, &zero, sizeof zero);
  zmq_setsockopt(socket, ZMQ_SNDHWM, &zero, sizeof zero);
  if (zmq_connect(socket, address.c_str()) != 0) return 1;
  std::vector<std::byte> input(tensors * tensor_bytes, std::byte{1});
  std::vector<std::byte> output(tensors * tensor_bytes);
  struct Piece {
    std::size_t offset;
    std::size_t size;
  };
  std::vector<Piece> pieces;
  for (std::size_t t = 0; t < tensors; ++t) {
    for (std::size_t at = 0; at < tensor_bytes; at += unit_bytes) {
      pieces.push_back({t * tensor_bytes + at, std::min(unit_bytes, tensor_bytes - at)});
    }
  }
  std::vector<double> milliseconds;
  for (int round = 0; round < rounds + warm_up; ++round) {
    const Clock::time_point start = Clock::now();
    std::size_t sent = 0;
    std::size_t under_way = 0;
    for (std::size_t received = 0; received < pieces.size(); ++received) {
      while (sent < pieces.size() &&
             (under_way == 0 || under_way + pieces[sent].size <= window_bytes)) {
        const std::size_t index = sent++;
        under_way += pieces[index].size;
        std::byte header[kHeaderBytes] = {};
        std::memcpy(header, &index, sizeof index);
        zmq_send(socket, header, sizeof header, ZMQ_SNDMORE);
        zmq_msg_t body;
        zmq_msg_init_data(&body, input.data() + pieces[index].offset, pieces[index].size, Free,
                          nullptr);
        if (zmq_msg_send(&body, socket, 0) < 0) return 1;
      }
      std::byte header[kHeaderBytes] = {};
      zmq_recv(socket, header, sizeof header, 0);
      std::size_t index = 0;
      std::memcpy(&index, header, sizeof index);
      zmq_msg_t body;
      zmq_msg_init(&body);
      if (zmq_msg_recv(&body, socket, 0) < 0 || index >= pieces.size()) return 1;
      std::memcpy(output.data() + pieces[index].offset, zmq_msg_data(&body), zmq_msg_size(&body));
      zmq_msg_close(&body);
      under_way -= pieces[index].size;
    }
    if (round >= warm_up) {
      milliseconds.push_back(
          std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    }
  }
  std::string list;
  for (const double ms : milliseconds) list += fmt::format("{}{:.3f}", list.empty() ? "" : ",", ms);
  std::cout << fmt::format("{{\"milliseconds\":[{}]}}", list) << std::endl;
  zmq_send(socket, "h", 1, ZMQ_SNDMORE);
  zmq_send(socket, nullptr, 0, 0);
  std::byte sink[kHeaderBytes];
  zmq_recv(socket, sink, sizeof sink, 0);
  zmq_close(socket);
  zmq_ctx_term(context);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gradwire::KeepMessageMemory();  // as Gradwire's programs do
  std::string serve;
  std::string connect;
  int workers = 2;
  std::size_t tensors = 8;
  std::size_t tensor_bytes = 4096000;
  std::size_t unit_bytes = 1 << 20;
  std::size_t window_bytes = 2 << 20;
  int rounds = 20;
  int warm_up = 5;
  CLI::App app{"bare ZeroMQ echo"};
  app.add_option("--serve", serve, "address to listen on");
  app.add_option("--connect", connect, "address of the server");
  app.add_option("--workers", workers);
  app.add_option("--tensors", tensors);
  app.add_option("--tensor-bytes", tensor_bytes);
  app.add_option("--unit-bytes", unit_bytes);
  app.add_option("--window-bytes", window_bytes);
  app.add_option("--rounds", rounds);
  app.add_option("--warm-up", warm_up);
  CLI11_PARSE(app, argc, argv);
  if (!serve.empty()) return Serve(serve, workers);
  return Work(connect, tensors, tensor_bytes, unit_bytes, window_bytes, rounds, warm_up);
}
