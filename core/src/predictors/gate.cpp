// gate:NxL: the routers of the next L layers applied to this layer's router input, its norm weights exchanged for
// theirs; the N likeliest experts of each. The residual stream changes little from layer to layer, so the guess is cheap
// and mostly right; the first layers are the weak ones.
#include <algorithm>
#include <numeric>
#include <vector>

#include "moestream/predictor.h"
#include "predictors/history.h"

namespace moestream {
namespace {

class Gate : public Predictor {
  public:
    Gate(const SlabIndex& index, const abi::Ops& ops, uint32_t experts, uint32_t layers)
        : index_(index), ops_(ops), wanted_(experts), layers_(layers), routers_(index.banks().size()) {
        wish_.reserve(size_t{experts} * layers);
    }

    std::span<const uint32_t> predict(const Choice& choice) override {
        if (choice.logits == nullptr || !learn(choice.bank, *choice.logits)) return {};
        const abi::Tensor& input = *choice.logits->src[1];
        if (input.ne[1] != 1 || input.data == nullptr) return {};
        wish_.clear();
        const size_t end = std::min<size_t>(choice.bank + 1 + layers_, routers_.size());
        for (size_t bank = choice.bank + 1; bank < end; ++bank) {
            name(routers_[choice.bank], static_cast<const float*>(input.data), bank);
        }
        return wish_;
    }

  private:
    struct Router {
        const float* weight = nullptr;  // [experts][width], in dense memory: its address is permanent
        const float* norm = nullptr;    // [width], of the norm before the router; null when there is none we know
        int64_t width = 0;
        uint32_t experts = 0;
    };

    // Adds what the router of `bank` would choose of the input `x` of the router `here`; nothing while it is not known.
    void name(const Router& here, const float* x, size_t bank) {
        const Router& next = routers_[bank];
        if (next.weight == nullptr || next.width != here.width) return;
        const bool swap = here.norm != nullptr && next.norm != nullptr;
        for (int64_t i = 0; i < here.width; ++i) {
            input_[i] = swap ? (here.norm[i] == 0 ? 0 : x[i] / here.norm[i] * next.norm[i]) : x[i];
        }
        for (uint32_t e = 0; e < next.experts; ++e) score_[e] = dot(next.weight + e * next.width, next.width);
        const uint32_t count = std::min(wanted_, next.experts);
        std::iota(order_.begin(), order_.begin() + next.experts, 0u);
        std::partial_sort(order_.begin(), order_.begin() + count, order_.begin() + next.experts,
                          [this](uint32_t a, uint32_t b) { return score_[a] > score_[b]; });
        for (uint32_t i = 0; i < count; ++i) wish_.push_back(index_.banks()[bank].first_expert + order_[i]);
    }

    // The graph is the only place that says where a router and its norm are; seen once, they stay.
    bool learn(uint32_t bank, const abi::Tensor& logits) {
        Router& router = routers_[bank];
        if (router.weight != nullptr) return true;
        if (logits.op != ops_.mul_mat || logits.src[0] == nullptr || logits.src[1] == nullptr) return false;
        const abi::Tensor& weight = *logits.src[0];
        const abi::Tensor& input = *logits.src[1];
        if (weight.type != abi::kTypeF32 || input.type != abi::kTypeF32) return false;
        if (weight.nb[1] != static_cast<size_t>(weight.ne[0]) * sizeof(float)) return false;
        if (weight.ne[1] != index_.banks()[bank].count) return false;
        router.width = weight.ne[0];
        router.experts = static_cast<uint32_t>(weight.ne[1]);
        const abi::Tensor* norm = input.op == ops_.mul ? input.src[1] : nullptr;
        if (norm != nullptr && norm->type == abi::kTypeF32 && norm->ne[0] == router.width && norm->ne[1] == 1) {
            router.norm = static_cast<const float*>(norm->data);
        }
        input_.resize(std::max<size_t>(input_.size(), router.width));
        score_.resize(std::max<size_t>(score_.size(), router.experts));
        order_.resize(score_.size());
        router.weight = static_cast<const float*>(weight.data);
        return true;
    }

    float dot(const float* row, int64_t width) const {
        // Eight sums, so that the compiler may use vectors without reordering a single one.
        float sums[8] = {};
        int64_t i = 0;
        for (; i + 8 <= width; i += 8) {
            for (int lane = 0; lane < 8; ++lane) sums[lane] += row[i + lane] * input_[i + lane];
        }
        float total = 0;
        for (; i < width; ++i) total += row[i] * input_[i];
        for (const float sum : sums) total += sum;
        return total;
    }

    const SlabIndex& index_;
    abi::Ops ops_;
    uint32_t wanted_;
    uint32_t layers_;
    std::vector<Router> routers_;
    std::vector<float> input_;
    std::vector<float> score_;
    std::vector<uint32_t> order_;
    std::vector<uint32_t> wish_;
};

uint32_t parse_layers(std::string_view text) {
    if (text.size() != 1 || text[0] < '1' || text[0] > '3') {
        throw Error(ErrorKind::usage, "gate:NxL takes 1 to 3 layers, not '" + std::string(text) + "'");
    }
    return static_cast<uint32_t>(text[0] - '0');
}

const PredictorRegistration registration(
    "gate", "the next L layers' routers on this layer's input; N experts a layer (default 1x1)",
    [](const SlabIndex& index, const abi::Ops& ops, const std::string& argument,
       const Seeds&) -> std::unique_ptr<Predictor> {
        const std::string_view text = argument;
        const auto times = text.find('x');
        const uint32_t layers = times == std::string_view::npos ? 1 : parse_layers(text.substr(times + 1));
        return std::make_unique<Gate>(index, ops, parse_wishes("gate", text.substr(0, times)), layers);
    });

}  // namespace
}  // namespace moestream
