#include "worker/trainer/checkpoint.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/trainer/files.h"
#include "tests/trainer/patterns.h"
#include "worker/trainer/local_client.h"
#include "worker/trainer/trainer.h"

namespace gradwire::trainer {
namespace {

bool Says(const Status& status, const std::string& words) {
  return status.message().find(words) != std::string::npos;
}

/// A state of two tensors with memory of its own.
struct Sample {
  explicit Sample(float first) {
    for (float& value : arrays[0]) value = first++;
    for (float& value : arrays[1]) value = first++;
    for (float& value : arrays[2]) value = first++;
    for (float& value : arrays[3]) value = first++;
    checkpoint.rank = 2;
    checkpoint.settings = {{"workers", "3"}, {"method", "none"}};
    checkpoint.tensors = {{"w", arrays[0], arrays[1]}, {"b", arrays[2], arrays[3]}};
  }
  std::vector<std::vector<float>> arrays = {std::vector<float>(5), std::vector<float>(5),
                                            std::vector<float>(3), std::vector<float>(3)};
  Checkpoint checkpoint;
};

std::vector<std::byte> SavedSample() {
  const std::vector<std::byte> optimizer(7, std::byte{11});
  const std::vector<std::byte> client(9, std::byte{12});
  Sample saved(1.0F);
  saved.checkpoint.step = 40;
  saved.checkpoint.curve_loss = 0.25;
  saved.checkpoint.optimizer = optimizer;
  saved.checkpoint.client = client;
  return ToBytes(saved.checkpoint);
}

TEST_CASE("a saved run comes back as it was", "[trainer][checkpoint]") {
  const std::vector<std::byte> bytes = SavedSample();
  Sample restored(-100.0F);
  REQUIRE(FromBytes(bytes, restored.checkpoint).ok());
  CHECK(restored.arrays == Sample(1.0F).arrays);
  CHECK(restored.checkpoint.step == 40);
  CHECK(restored.checkpoint.curve_loss == 0.25);
  CHECK(restored.checkpoint.optimizer.size() == 7);
  CHECK(restored.checkpoint.optimizer[6] == std::byte{11});
  CHECK(restored.checkpoint.client.size() == 9);
  CHECK(restored.checkpoint.client[8] == std::byte{12});
}

TEST_CASE("a damaged run is refused and changes nothing", "[trainer][checkpoint]") {
  const std::vector<std::byte> bytes = SavedSample();
  const auto refuse = [](ByteView damaged) {
    Sample restored(-100.0F);
    const Status status = FromBytes(damaged, restored.checkpoint);
    CAPTURE(status.ToString());
    CHECK(status.code() == StatusCode::kCorruptData);
    CHECK(Says(status, "the saved run is damaged: "));
    CHECK(restored.arrays == Sample(-100.0F).arrays);
    CHECK(restored.checkpoint.step == 0);
  };
  for (std::size_t size = 0; size < bytes.size(); ++size) refuse(ByteView(bytes).first(size));
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    std::vector<std::byte> flipped = bytes;
    flipped[at] ^= std::byte{1};
    refuse(flipped);
  }
}

TEST_CASE("a run of something else is refused by what differs", "[trainer][checkpoint]") {
  const std::vector<std::byte> bytes = SavedSample();
  const auto refuse = [&](const std::function<void(Checkpoint&)>& change, const std::string& says) {
    Sample restored(-100.0F);
    change(restored.checkpoint);
    const Status status = FromBytes(bytes, restored.checkpoint);
    CHECK(status.code() == StatusCode::kInvalidArgument);
    CHECK(status.message() == "the saved run " + says);
    CHECK(restored.arrays == Sample(-100.0F).arrays);
  };
  refuse([](Checkpoint& c) { c.rank = 1; }, "is of rank 2, expected 1");
  refuse([](Checkpoint& c) { c.settings[0].second = "4"; }, "has workers 3, expected 4");
  refuse([](Checkpoint& c) { c.settings[1].second = "lans"; }, "has method none, expected lans");
  refuse([](Checkpoint& c) { c.tensors[1].name = "v"; },
         "has another model: tensor 'b' of 3 values, expected 'v' of 3");
  refuse([](Checkpoint& c) { c.tensors[0].value = c.tensors[0].value.first(4); },
         "has another model: tensor 'w' of 5 values, expected 'w' of 4");
  refuse([](Checkpoint& c) { c.tensors.pop_back(); }, "has another model: 2 tensors, expected 1");
}

TEST_CASE("a folder has the states of each rank by step", "[trainer][checkpoint]") {
  const TempFolder temporary;
  const CheckpointFolder mine(temporary / "new/folder", 1);
  const CheckpointFolder other(temporary / "new/folder", 11);
  CHECK(mine.Steps().empty());
  const std::vector<std::byte> bytes(100, std::byte{3});
  for (const std::uint64_t step : {8U, 100U, 20U}) REQUIRE(mine.Write(step, bytes).ok());
  REQUIRE(other.Write(30, bytes).ok());
  WriteFile(temporary / "new/folder/rank-1.step-12x", bytes);
  WriteFile(temporary / "new/folder/rank-1.step-", bytes);
  WriteFile(temporary / "new/folder/rank-1.step-30.ab12.tmp", bytes);
  CHECK(mine.Steps() == std::vector<std::uint64_t>{100, 20, 8});
  const auto read = mine.Read(20);
  REQUIRE(read.ok());
  CHECK(*read == bytes);
  mine.KeepOnly(20);
  CHECK(mine.Steps() == std::vector<std::uint64_t>{20});
  CHECK(other.Steps() == std::vector<std::uint64_t>{30});
  CHECK(!std::filesystem::exists(temporary / "new/folder/rank-1.step-30.ab12.tmp"));
  CHECK(std::filesystem::exists(temporary / "new/folder/rank-1.step-12x"));
  const Status missing = mine.Read(8).status();
  CHECK(missing.code() == StatusCode::kInternal);
  CHECK(Says(missing, "cannot read saved run '" + mine.FileOf(8) + "': No such file"));
  WriteFile(temporary / "file", bytes);
  const Status unwritable = CheckpointFolder(temporary / "file", 0).Write(1, bytes);
  CHECK(unwritable.code() == StatusCode::kInternal);
  CHECK(Says(unwritable, "cannot write saved run"));
}

struct Trained {
  Status status;
  TrainReport report;
};

Trained Go(const TrainOptions& options, std::uint64_t model_seed = 1) {
  const Dataset data = MakePatterns(96);
  const auto client = MakeLocalClient();
  const auto model = MakeSmall(options.batch, model_seed);
  Result<TrainReport> report = Train(*client, *model, data, options);
  if (!report.ok()) return {report.status(), {}};
  return {Status::Ok(), *report};
}

TEST_CASE("a run that is stopped and restored ends as if nothing had been",
          "[trainer][checkpoint]") {
  struct Case {
    std::string method;
    std::uint64_t stop_at;
  };
  const Case given =
      GENERATE(Case{"none", 13}, Case{"none", 39}, Case{"lans", 13}, Case{"dist_ef_sgdm", 13},
               Case{"onebit_adam(freeze_step=20)", 13}, Case{"onebit_adam(freeze_step=20)", 20},
               Case{"onebit_adam(freeze_step=20)", 27});
  CAPTURE(given.method, given.stop_at);
  const TempFolder folder;
  TrainOptions options;
  options.steps = 40;
  options.batch = 16;
  options.rate = 0.01;
  options.method = given.method;
  options.momentum = 0.8;
  options.warmup_steps = 4;
  const Trained whole = Go(options);
  REQUIRE(whole.status.ok());

  TrainOptions saving = options;
  saving.save_folder = folder.path();
  saving.save_every = 5;
  const Trained watched = Go(saving);
  REQUIRE(watched.status.ok());
  CHECK(watched.report.digest == whole.report.digest);
  // Not after the last step; those before were removed.
  CHECK(CheckpointFolder(folder.path(), 0).Steps() == std::vector<std::uint64_t>{35});

  saving.save_every = 0;
  saving.stop_at = given.stop_at;
  const Trained stopped = Go(saving);
  REQUIRE(stopped.status.ok());
  CHECK(stopped.report.steps == given.stop_at);
  CHECK(stopped.report.digest != whole.report.digest);
  CHECK(CheckpointFolder(folder.path(), 0).Steps() == std::vector<std::uint64_t>{given.stop_at});

  // Another model's weights: all of them come from the saved run.
  TrainOptions restoring = options;
  restoring.restore_folder = folder.path();
  const Trained restored = Go(restoring, 99);
  REQUIRE(restored.status.ok());
  CHECK(restored.report.digest == whole.report.digest);
  CHECK(restored.report.steps == 40);
  CHECK(restored.report.first_step == given.stop_at);
}

TEST_CASE("the curve of a restored run goes on where it was", "[trainer][checkpoint]") {
  const TempFolder folder;
  const Dataset test = MakePatterns(32);
  TrainOptions options;
  options.steps = 20;
  options.batch = 16;
  options.test_every = 5;
  options.test_data = &test;
  const Trained whole = Go(options);
  REQUIRE(whole.report.curve.size() == 4);
  TrainOptions saving = options;
  saving.save_folder = folder.path();
  saving.stop_at = 13;
  REQUIRE(Go(saving).report.curve.size() == 2);
  options.restore_folder = folder.path();
  const Trained restored = Go(options);
  REQUIRE(restored.report.curve.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(restored.report.curve[i].step == whole.report.curve[i + 2].step);
    CHECK(restored.report.curve[i].loss == whole.report.curve[i + 2].loss);
    CHECK(restored.report.curve[i].test.loss == whole.report.curve[i + 2].test.loss);
  }
}

TEST_CASE("a run that can't be saved or restored says why", "[trainer][checkpoint]") {
  const TempFolder folder;
  TrainOptions options;
  options.steps = 20;
  options.batch = 16;
  TrainOptions saving = options;
  saving.save_folder = folder.path();
  saving.stop_at = 10;
  REQUIRE(Go(saving).status.ok());
  const auto refuse = [&](const std::function<void(TrainOptions&)>& change,
                          const std::string& says) {
    TrainOptions changed = options;
    changed.restore_folder = folder.path();
    change(changed);
    const Status status = Go(changed).status;
    CAPTURE(says, status.ToString());
    CHECK(!status.ok());
    CHECK(Says(status, says));
  };
  refuse([](TrainOptions& o) { o.method = "lans"; }, "has method none, expected lans");
  refuse([](TrainOptions& o) { o.momentum = 0.9; }, "has momentum 0.5, expected 0.9");
  refuse([](TrainOptions& o) { o.batch = 8; }, "has batch 16, expected 8");
  refuse([](TrainOptions& o) { o.seed = 2; }, "has seed 1, expected 2");
  refuse([](TrainOptions& o) { o.steps = 30; }, "has steps 20, expected 30");
  refuse([](TrainOptions& o) { o.stop_at = 10; },
         "rank-0.step-10': the saved run is at step 10, and this one ends at step 10");
  refuse([&](TrainOptions& o) { o.restore_folder = folder / "none"; },
         "there is no saved run of rank 0 in '" + folder / "none" + "'");
  WriteFile(folder / "file", {});
  refuse([&](TrainOptions& o) { o.save_folder = folder / "file", o.save_every = 1; },
         "cannot write saved run '" + folder / "file/rank-0.step-11'");
  const CheckpointFolder states(folder.path(), 0);
  std::vector<std::byte> bytes = *states.Read(10);
  WriteFile(states.FileOf(11), bytes);
  refuse([](TrainOptions&) {}, "rank-0.step-11': the saved run is at step 10, expected 11");
  bytes.pop_back();
  WriteFile(states.FileOf(12), bytes);
  refuse([](TrainOptions&) {}, "rank-0.step-12': the saved run is damaged: checksum");
  TrainOptions senseless = options;
  senseless.save_every = 5;
  CHECK(Says(Go(senseless).status, "saves every 5 steps without a folder"));
  senseless = options;
  senseless.stop_at = 20;
  CHECK(Says(Go(senseless).status, "stops at step 20, expected below 20"));
}

}  // namespace
}  // namespace gradwire::trainer
