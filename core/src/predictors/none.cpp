// none: no expert is read before it is routed.
#include "moestream/predictor.h"

namespace moestream {
namespace {

struct None : Predictor {
    std::span<const uint32_t> predict(const Choice&) override { return {}; }
};

const PredictorRegistration registration(
    "none", "no expert is read before it is routed",
    [](const SlabIndex&, const abi::Ops&, const std::string&, const Seeds&) { return std::make_unique<None>(); });

}  // namespace
}  // namespace moestream
