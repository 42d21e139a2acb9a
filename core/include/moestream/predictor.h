// Which experts the next layer will probably want, said while this layer's bytes are on their way.
//
// A prediction is only ever a wish: the store reads it when no demand is in flight and never at the cost of what this
// or the next layer needs. It cannot change the text.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "moestream/cache.h"
#include "moestream/llama_abi.h"
#include "moestream/registry.h"
#include "moestream/seeds.h"
#include "moestream/slab_index.h"

namespace moestream {

class Predictor {
  public:
    virtual ~Predictor() = default;
    // Bank `bank` has been routed to `routed` (distinct global experts, ascending) in a step of `tokens` tokens;
    // `logits` is its router's matmul node (null when it was not seen). Returns global experts of bank + 1, the
    // likeliest first; the span is valid until the next call. Allocates nothing after the first step.
    virtual std::span<const uint32_t> predict(uint32_t bank, std::span<const RoutedExpert> routed, uint32_t tokens,
                                              const abi::Tensor* logits) = 0;
};

using PredictorFactory =
    std::function<std::unique_ptr<Predictor>(const SlabIndex&, const abi::Ops&, const std::string& argument,
                                             const Seeds&)>;
using PredictorRegistration = Registration<PredictorFactory>;

}  // namespace moestream
