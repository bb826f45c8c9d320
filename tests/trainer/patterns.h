#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common/base/random.h"
#include "worker/trainer/dataset.h"
#include "worker/trainer/layers.h"
#include "worker/trainer/model.h"

namespace gradwire::trainer {

inline constexpr std::size_t kSide = 8;

/// Images of ten classes: a bright random pattern each, with noise over it.
inline Dataset MakePatterns(std::size_t size) {
  CounterRng rng(11);
  std::vector<std::uint8_t> patterns(10 * kSide * kSide);
  for (std::uint8_t& p : patterns) p = rng.NextBelow(2) == 0 ? 40 : 160;
  Dataset data;
  data.height = kSide;
  data.width = kSide;
  data.classes = 10;
  for (std::size_t i = 0; i < size; ++i) {
    const std::size_t label = rng.NextBelow(10);
    data.labels.push_back(static_cast<std::uint8_t>(label));
    for (std::size_t p = 0; p < data.sample_size(); ++p) {
      data.pixels.push_back(
          static_cast<std::uint8_t>(patterns[label * data.sample_size() + p] + rng.NextBelow(80)));
    }
  }
  return data;
}

/// Three dense layers, small.
inline std::unique_ptr<Model> MakeSmall(std::size_t max_batch, std::uint64_t seed = 1) {
  std::vector<std::unique_ptr<Layer>> layers;
  layers.push_back(MakeDense("dense0", kSide * kSide, 32, true));
  layers.push_back(MakeDense("dense1", 32, 24, true));
  layers.push_back(MakeDense("dense2", 24, 10, false));
  return std::make_unique<Model>(std::move(layers), max_batch, seed);
}

}  // namespace gradwire::trainer
