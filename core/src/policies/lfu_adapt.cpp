// lfu-adapt: the expert least to be expected leaves. What is expected of an expert is the mean of two estimates of how
// often it will be used in the next passes:
// - its decayed frequency, averaged over half-lives from 4 to 256 tokens. No half-life is best for every text (code
//   likes 8, prose 64), and the average is as good as the best of them on each;
// - how often it was used after moments like this one (moments.h). This is what follows the text: a half-life can only
//   tell the recent from the old, likeness tells what belongs to the phrase at hand.
// Experts of banks that this pass has yet to reach are needed a pass sooner than those it has passed. Of an expert
// expected with p a pass and one with q that is a pass further away, the first is used first with odds p : (1 - p) q, so
// p / (1 - p) is held against q.
//
// A bank's estimates are made anew when its route is complete: when the first of its experts is unpinned, or another
// route's use comes. That costs O(experts of the bank) and Moments::expect once a route; a victim costs O(banks).
#include <algorithm>
#include <array>

#include "candidates.h"
#include "decayed_use.h"
#include "indexed_heap.h"
#include "moments.h"

namespace moestream {
namespace {

constexpr std::array<double, 4> kHalfLives = {4.0, 16.0, 64.0, 256.0};  // tokens
constexpr double kFrequencyShare = 0.4;  // of the estimate; the rest is what followed moments like this one
constexpr double kMostExpected = 0.98;   // more is as good as certain
constexpr double kForgotten = 1e-30;     // a frequency below is none (and no slow denormal number)

using Frequencies = std::array<double, kHalfLives.size()>;  // uses, decayed at each half-life

// What a route does to the frequencies of its bank's experts, `since` tokens after the one before.
class Decay {
  public:
    Decay(uint64_t since, uint32_t tokens) {
        for (size_t i = 0; i < kHalfLives.size(); ++i) {
            kept_[i] = std::exp2(-(static_cast<double>(since) / kHalfLives[i]));
            added_[i] = mean_decay(tokens, kHalfLives[i]);
            rate_[i] = (1.0 - std::exp2(-(1.0 / kHalfLives[i]))) / kHalfLives.size();
        }
    }
    // The mean rate of use, in uses a token.
    double apply(Frequencies& frequencies, uint64_t count) const {
        double rate = 0.0;
        for (size_t i = 0; i < kHalfLives.size(); ++i) {
            double& frequency = frequencies[i];
            frequency = frequency * kept_[i] + static_cast<double>(count) * added_[i];
            if (frequency < kForgotten) frequency = 0.0;
            rate += frequency * rate_[i];
        }
        return rate;
    }

  private:
    Frequencies kept_, added_, rate_;
};

class LfuAdapt final : public CandidatePolicy {
  public:
    explicit LfuAdapt(const PolicyShape& shape)
        : CandidatePolicy(shape.experts),
          banks_(shape.banks),
          place_(shape.experts),
          experts_(shape.experts),
          moments_(shape.banks, widest(shape)) {
        for (uint32_t expert = 0; expert < shape.experts; ++expert) {
            std::vector<uint32_t>& members = banks_[shape.bank_of[expert]].members;
            place_[expert] = {shape.bank_of[expert], static_cast<uint32_t>(members.size())};
            members.push_back(expert);
        }
        heaps_.reserve(shape.banks);
        for (const Bank& bank : banks_)
            heaps_.emplace_back(static_cast<uint32_t>(bank.members.size()), Less{&experts_, &bank.members});
        expected_.resize(widest(shape));
    }
    LfuAdapt(const LfuAdapt&) = delete;  // the heaps point at experts_ and banks_
    LfuAdapt& operator=(const LfuAdapt&) = delete;

    void use(uint32_t expert, const Use& use) override {
        const auto [bank, number] = place_[expert];
        if (open_ != bank || !same_pass(use)) {
            close();
            open(bank, use);
        }
        experts_[expert].last = ++clock_;
        experts_[expert].count += use.count;
        if (tokens_ == 1) moments_.add(bank, number);
        if (candidate(expert)) heaps_[bank].update(number);
    }
    void pin(uint32_t expert, bool pinned) override {
        if (!pinned && place_[expert].bank == open_) close();
        CandidatePolicy::pin(expert, pinned);
    }
    uint32_t victim(uint32_t incoming) override {
        uint32_t least = kNone;
        double least_worth = 0.0;
        for (uint32_t bank = 0; bank < banks_.size(); ++bank) {
            if (heaps_[bank].top() == kNone) continue;
            const uint32_t expert = banks_[bank].members[heaps_[bank].top()];
            const bool passed = banks_[bank].pass == pass_ || bank == place_[incoming].bank;
            const double expected = experts_[expert].expected;
            const double worth = passed ? expected : expected / (1.0 - expected);
            if (least == kNone || worth < least_worth || (worth == least_worth && older(expert, least))) {
                least = expert;
                least_worth = worth;
            }
        }
        return least;
    }

  private:
    struct Place {
        uint32_t bank = 0, number = 0;
    };
    struct Expert {
        double expected = 0.0;  // uses a pass
        uint64_t last = 0;      // number of its last use
        uint64_t count = 0;     // uses in the open route
        Frequencies frequency{};
    };
    struct Bank {
        std::vector<uint32_t> members;
        uint64_t pass = 0;   // the last that reached it
        uint64_t token = 0;  // to which its frequencies have decayed
    };
    struct Less {
        const std::vector<Expert>* experts;
        const std::vector<uint32_t>* members;
        bool operator()(uint32_t a, uint32_t b) const {
            const Expert &x = (*experts)[(*members)[a]], &y = (*experts)[(*members)[b]];
            if (x.expected != y.expected) return x.expected < y.expected;
            return x.last != y.last ? x.last < y.last : a < b;
        }
    };
    static uint32_t widest(const PolicyShape& shape) {
        std::vector<uint32_t> size(shape.banks, 0);
        for (const uint32_t bank : shape.bank_of) ++size[bank];
        return *std::max_element(size.begin(), size.end());
    }
    bool older(uint32_t a, uint32_t b) const {
        return experts_[a].last != experts_[b].last ? experts_[a].last < experts_[b].last : a < b;
    }
    bool same_pass(const Use& use) const { return pass_ > 0 && use.token == token_ && use.tokens == tokens_; }
    void open(uint32_t bank, const Use& use) {
        if (!same_pass(use) || banks_[bank].pass == pass_) {
            ++pass_;
            token_ = use.token;
            tokens_ = use.tokens;
            if (tokens_ == 1) moments_.begin();
        }
        open_ = bank;
        banks_[bank].pass = pass_;
    }
    void close() {
        if (open_ == kNone) return;
        Bank& bank = banks_[open_];
        const uint64_t now = std::max(bank.token, token_ + tokens_ - 1);
        std::fill_n(expected_.begin(), bank.members.size(), 0.0);
        const double weight = tokens_ == 1 ? moments_.expect(open_, expected_.data()) : 0.0;
        const Decay decay(now - bank.token, tokens_);
        bank.token = now;
        for (uint32_t number = 0; number < bank.members.size(); ++number) {
            Expert& expert = experts_[bank.members[number]];
            const double frequent = decay.apply(expert.frequency, expert.count);
            expert.count = 0;
            const double alike = weight > 0.0 ? expected_[number] / weight : frequent;
            const double both = frequent * kFrequencyShare + alike * (1.0 - kFrequencyShare);
            expert.expected = std::min(both, kMostExpected);
        }
        heaps_[open_].rebuild();
        open_ = kNone;
    }
    void enter(uint32_t expert) override { heaps_[place_[expert].bank].push(place_[expert].number); }
    void leave(uint32_t expert) override { heaps_[place_[expert].bank].remove(place_[expert].number); }

    std::vector<Bank> banks_;
    std::vector<Place> place_;  // per expert
    std::vector<Expert> experts_;
    std::vector<IndexedHeap<Less>> heaps_;  // per bank: its candidates, least expected first
    Moments moments_;
    std::vector<double> expected_;  // per number in the bank, while a route is closed
    uint32_t open_ = kNone;         // the bank whose route is being used
    uint64_t token_ = 0;            // of the current pass
    uint32_t tokens_ = 1;
    uint64_t pass_ = 0;
    uint64_t clock_ = 0;
};

const PolicyRegistration registration(
    "lfu-adapt",
    "the expert least expected leaves: by its frequency of late and by what followed moments like this one; no argument",
    [](const PolicyShape& shape, const std::string& argument) -> std::unique_ptr<Policy> {
        expect_no_argument("lfu-adapt", argument);
        return std::make_unique<LfuAdapt>(shape);
    });

}  // namespace
}  // namespace moestream
