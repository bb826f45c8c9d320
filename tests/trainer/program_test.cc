// Runs gradwire-train itself, on a data set made here.

#include <sys/wait.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "tests/catch.h"
#include "tests/trainer/files.h"

namespace gradwire::trainer {
namespace {

struct Finished {
  int exit_code = -1;
  std::string output;  // both streams
};

/// Runs gradwire-train with arguments (no shell characters in them), for a minute at most.
Finished RunTrainer(const std::string& arguments, const std::string& environment = "") {
  const std::string command = "env -i PATH=/usr/bin:/bin " + environment +
                              " timeout 60 " GRADWIRE_TRAIN " " + arguments + " 2>&1";
  std::FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  Finished finished;
  char buffer[4096];
  for (std::size_t got = 0; (got = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    finished.output.append(buffer, got);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) finished.exit_code = WEXITSTATUS(status);
  return finished;
}

void AppendBe32(std::vector<std::byte>& bytes, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) {
    bytes.push_back(static_cast<std::byte>(value >> shift));
  }
}

/// A data set of 28 x 28 pixels in Fashion-MNIST's four files; bright where the label says.
void WriteDataset(const TempFolder& folder) {
  CounterRng rng(1);
  for (const std::string split : {"train", "t10k"}) {
    constexpr std::uint32_t kSize = 200;
    std::vector<std::byte> images;
    std::vector<std::byte> labels;
    AppendBe32(images, 0x803);
    AppendBe32(labels, 0x801);
    for (const std::uint32_t extent : {kSize, 28U, 28U}) AppendBe32(images, extent);
    AppendBe32(labels, kSize);
    for (std::uint32_t i = 0; i < kSize; ++i) {
      const std::uint64_t label = rng.NextBelow(10);
      labels.push_back(static_cast<std::byte>(label));
      for (std::uint64_t pixel = 0; pixel < 784; ++pixel) {
        const std::uint64_t level = pixel / 28 / 3 == label ? 150 : 20;
        images.push_back(static_cast<std::byte>(level + rng.NextBelow(80)));
      }
    }
    WriteGzip(folder / (split + "-images-idx3-ubyte.gz"), images);
    WriteGzip(folder / (split + "-labels-idx1-ubyte.gz"), labels);
  }
}

std::string ReadText(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "r");
  REQUIRE(file != nullptr);
  char buffer[8192];
  const std::size_t got = std::fread(buffer, 1, sizeof(buffer), file);
  std::fclose(file);
  return {buffer, got};
}

/// The text of a key's value in a report.
std::string ValueOf(const std::string& json, const std::string& key) {
  const std::string start = "\"" + key + "\": ";
  const std::size_t at = json.find(start);
  REQUIRE(at != std::string::npos);
  const std::size_t from = at + start.size();
  return json.substr(from, json.find_first_of(",\n", from) - from);
}

TEST_CASE("the program trains alone, repeats itself and writes a report", "[trainer][program]") {
  const TempFolder folder;
  WriteDataset(folder);
  const std::string arguments =
      "--standalone --model conv --batch 20 --lr 0.02 --progress-every 0 "
      "--data-dir " +
      folder.path() + " --seed 5";
  const Finished first = RunTrainer(arguments + " --steps 60 --json " + (folder / "first.json"));
  CAPTURE(first.output);
  REQUIRE(first.exit_code == 0);
  const std::string json = ReadText(folder / "first.json");
  CHECK(ValueOf(json, "model") == "\"conv\"");
  CHECK(ValueOf(json, "steps") == "60");
  CHECK(ValueOf(json, "seed") == "5");
  CHECK(ValueOf(json, "workers") == "1");
  CHECK(std::stod(ValueOf(json, "accuracy")) > 0.9);
  CHECK(std::stod(ValueOf(json, "last_loss")) < std::stod(ValueOf(json, "first_loss")));
  CHECK(first.output.find("accuracy") != std::string::npos);

  // 6 epochs of 200 samples are 60 steps of 20; {rank} in the name is filled in.
  const Finished second =
      RunTrainer(arguments + " --epochs 6 --json '" + (folder / "second-{rank}.json") + "'");
  CAPTURE(second.output);
  REQUIRE(second.exit_code == 0);
  const std::string again = ReadText(folder / "second-0.json");
  CHECK(ValueOf(again, "digest") == ValueOf(json, "digest"));
  CHECK(ValueOf(again, "accuracy") == ValueOf(json, "accuracy"));
}

TEST_CASE("the program trains on texts and reports the loss on what it has not seen",
          "[trainer][program]") {
  const TempFolder folder;
  const std::string sentence = "The quick brown fox jumps over the lazy dog.\n";
  std::vector<std::byte> text;
  for (int i = 0; i < 100; ++i) {
    for (const char c : sentence) text.push_back(static_cast<std::byte>(c));
  }
  WriteFile(folder / "a", text);
  const Finished run = RunTrainer(
      "--standalone --model charlm --batch 16 --steps 100 --progress-every 0 --data-dir " +
      folder.path() + " --json " + (folder / "run.json"));
  CAPTURE(run.output);
  REQUIRE(run.exit_code == 0);
  const std::string json = ReadText(folder / "run.json");
  CHECK(ValueOf(json, "model") == "\"charlm\"");
  CHECK(std::stod(ValueOf(json, "test_loss")) < 0.1 * std::stod(ValueOf(json, "first_loss")));
  CHECK(std::stod(ValueOf(json, "accuracy")) > 0.9);
  CHECK(run.output.find("perplexity") != std::string::npos);
}

TEST_CASE("the program takes its seed from the configuration", "[trainer][program]") {
  const TempFolder folder;
  WriteDataset(folder);
  const Finished run =
      RunTrainer("--standalone --model conv --batch 4 --steps 1 --set job.seed=77 --data-dir " +
                 folder.path() + " --json " + (folder / "run.json"));
  CAPTURE(run.output);
  REQUIRE(run.exit_code == 0);
  CHECK(ValueOf(ReadText(folder / "run.json"), "seed") == "77");
}

TEST_CASE("the program trains with a method of the command line or of the configuration",
          "[trainer][program]") {
  const TempFolder folder;
  WriteDataset(folder);
  const std::string arguments =
      "--standalone --model conv --batch 20 --steps 60 --progress-every 0 --data-dir " +
      folder.path() + " --json " + (folder / "run.json");
  std::vector<std::string> digests;
  for (const std::string method :
       {"--method adamw", "--set method=adamw", "--method none", "--method 'lans(beta1=0.8)'",
        "--method onebit_adam --set compression.warmup_steps=20"}) {
    CAPTURE(method);
    const Finished run = RunTrainer(arguments + " " + method);
    CAPTURE(run.output);
    REQUIRE(run.exit_code == 0);
    const std::string json = ReadText(folder / "run.json");
    CHECK(std::stod(ValueOf(json, "last_loss")) < 0.5 * std::stod(ValueOf(json, "first_loss")));
    digests.push_back(ValueOf(json, "digest"));
    if (digests.size() == 1) {
      CHECK(ValueOf(json, "method") == "\"adamw\"");
      CHECK(ValueOf(json, "rate") == "0.001");
    }
    if (digests.size() == 4) CHECK(ValueOf(json, "method") == "\"lans(beta1=0.8)\"");
  }
  CHECK(digests[0] == digests[1]);
  CHECK(digests[0] != digests[2]);
  CHECK(digests[0] != digests[3]);
  CHECK(digests[0] != digests[4]);
}

TEST_CASE("wrong usage ends with exit code 2 and says why", "[trainer][program]") {
  const TempFolder folder;
  WriteDataset(folder);
  const std::string data = " --data-dir " + folder.path();
  struct Wrong {
    std::string arguments;
    std::string says;
    std::string environment = "";
  };
  const std::vector<Wrong> wrong = {
      {"--bogus", "--bogus"},
      {"--batch 0", "--batch"},
      {"--lr fast", "--lr"},
      {"--steps 1 --epochs 1", "--epochs"},
      {"--steps 0", "--steps"},
      {"--epochs 0", "--epochs"},
      {"--save " + folder.path(), "--save: wants --save-every or --stop-at beside it"},
      {"--save-every 5", "--save"},
      {"--save " + folder.path() + " --save-every 0", "--save-every"},
      {"--stop-at 0", "--stop-at"},
      {"--standalone --model vgg" + data, "mlp, conv and charlm"},
      {"--standalone --data-dir " + folder / "none", "dataset-fashion-mnist"},
      {"--standalone --model charlm --data-dir " + folder / "none", "base-files"},
      {"--config " + folder / "none.yaml", "none.yaml"},
      {"--set job.worker=2", "job.worker"},
      {"--set job.workers=2" + data, "GRADWIRE_RANK"},
      {"--set job.workers=2 --rank 2" + data, "below 2"},
      {"--standalone" + data, "'one'", "GRADWIRE_RANK=one"},
      {"--standalone --method lams" + data, "did you mean 'lamb'?"},
      {"--standalone --method clan" + data, "method lans does without"},
      {"--standalone --method onebit_adam" + data, "compression.warmup_steps"},
      {"--standalone --method lans --momentum 0.5" + data, "--momentum is for training without"},
      {"--standalone --weight-decay 0.1" + data, "--weight-decay is for training without",
       "GRADWIRE_METHOD=sgd"},
  };
  for (const Wrong& w : wrong) {
    const Finished run = RunTrainer(w.arguments, w.environment);
    CAPTURE(w.arguments, run.output);
    CHECK(run.exit_code == 2);
    CHECK(run.output.find(w.says) != std::string::npos);
  }
  CHECK(RunTrainer("--help").exit_code == 0);
}

TEST_CASE("damaged data end the program with exit code 1", "[trainer][program]") {
  const TempFolder folder;
  WriteDataset(folder);
  WriteFile(folder / "train-labels-idx1-ubyte.gz", std::vector<std::byte>(100));
  const Finished run = RunTrainer("--standalone --data-dir " + folder.path());
  CAPTURE(run.output);
  CHECK(run.exit_code == 1);
  CHECK(run.output.find("train-labels") != std::string::npos);
}

TEST_CASE("a job that doesn't start ends with exit code 3", "[trainer][program]") {
  const TempFolder folder;
  WriteDataset(folder);
  // Nothing listens on port 1.
  const Finished run = RunTrainer(
      "--set endpoint=tcp://127.0.0.1:1 --set timeouts.start=500ms --data-dir " + folder.path());
  CAPTURE(run.output);
  CHECK(run.exit_code == 3);
}

}  // namespace
}  // namespace gradwire::trainer
