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

// One bank's choice, just made. Valid for the call only.
struct Choice {
    uint32_t bank = 0;
    std::span<const RoutedExpert> routed;  // distinct global experts, ascending: what the step's tokens chose together
    const abi::Tensor& ids;                // i32 [k, tokens], each row in the router's own order, inside the bank;
                                           // a view of a wider sort: rows are nb[1] apart
    const abi::Tensor* logits = nullptr;   // the router's matmul node; null when it was not seen
};

class Predictor {
  public:
    virtual ~Predictor() = default;
    // Called once for each choice, in the order they are made. Returns global experts of banks that are routed next, be
    // it in this step or the next, the nearest bank first, and of a bank the likeliest first. The span is valid until
    // the next call. Allocates nothing once each bank has been routed.
    virtual std::span<const uint32_t> predict(const Choice& choice) = 0;
};

using PredictorFactory =
    std::function<std::unique_ptr<Predictor>(const SlabIndex&, const abi::Ops&, const std::string& argument,
                                             const Seeds&)>;
using PredictorRegistration = Registration<PredictorFactory>;

}  // namespace moestream
