// s3fifo (Yang et al., SOSP 2023): most newcomers are never used again, so they are tried in a small queue (a tenth of
// the frames) and only those used twice more there go on to the main one. Who leaves the small queue is remembered in a
// ghost queue, and goes straight to the main one when it comes back in time. The main queue gives an expert another
// turn for each use, three at most.
//
// As in the authors' own code, newcomers overflow into the main queue until the first victim has been named. The use
// that an expert was loaded for does not count, and an early load that was never used leaves no ghost. Pinned experts
// keep their places; when a queue that should give has only pinned ones, the other gives.
#include <algorithm>

#include "candidates.h"
#include "indexed_heap.h"
#include "recency_lists.h"

namespace moestream {
namespace {

constexpr uint8_t kMaxAgain = 3, kWorthy = 2;  // uses after the first: counted at most; to leave the small queue

class S3Fifo final : public CandidatePolicy {
  public:
    explicit S3Fifo(const PolicyShape& shape)
        : CandidatePolicy(shape.experts),
          small_room_(std::max(1u, shape.capacity / 10)),
          main_room_(shape.capacity - small_room_),
          ghost_room_(static_cast<uint32_t>(uint64_t{shape.capacity} * 9 / 10)),
          items_(shape.experts),
          joined_(shape.experts, 0),
          small_(shape.experts, Earlier{&joined_}),
          main_(shape.experts, Earlier{&joined_}),
          ghost_(shape.experts, 1) {}
    S3Fifo(const S3Fifo&) = delete;  // the heaps point at joined_
    S3Fifo& operator=(const S3Fifo&) = delete;

    void use(uint32_t expert, const Use&) override {
        Item& item = items_[expert];
        if (item.used && item.again < kMaxAgain) ++item.again;
        item.used = true;
    }
    void admit(uint32_t expert) override {
        Item& item = items_[expert];
        if (item.ghost) recall(expert);
        const bool in_main = item.returns || (!has_evicted_ && held_[kSmall] >= small_room_);
        item.used = item.returns = false;
        item.again = 0;
        join(expert, in_main ? kMain : kSmall);
        CandidatePolicy::admit(expert);
    }
    void forget(uint32_t expert) override {
        CandidatePolicy::forget(expert);
        const Item& item = items_[expert];
        --held_[item.queue];
        if (item.queue == kSmall && item.used && ghost_room_ > 0) remember(expert);
    }
    uint32_t victim(uint32_t incoming) override {
        if (small_.top() == kNone && main_.top() == kNone) return kNone;
        has_evicted_ = true;
        // Before the victim needs a place among the ghosts, which might be this one's.
        if (items_[incoming].ghost) recall(incoming);
        const bool main_gives = held_[kMain] > main_room_ || held_[kSmall] == 0;
        const uint32_t first = main_gives ? of_main() : of_small();
        if (first != kNone) return first;
        // The small queue may just have handed its candidates to the main one, never the other way round.
        const uint32_t second = main_gives ? of_small() : of_main();
        return second != kNone ? second : of_main();
    }

  private:
    enum Queue : uint8_t { kSmall, kMain };
    struct Item {
        Queue queue = kSmall;
        bool used = false;   // since it was loaded
        bool ghost = false;  // absent, and remembered
        bool returns = false;  // was a ghost when its place was made
        uint8_t again = 0;   // uses after the first, since it was loaded or last given another turn
    };
    void join(uint32_t expert, Queue queue) {
        items_[expert].queue = queue;
        joined_[expert] = ++clock_;
        ++held_[queue];
    }
    uint32_t of_small() {
        uint32_t expert = small_.top();
        for (; expert != kNone && items_[expert].again >= kWorthy; expert = small_.top()) {
            small_.remove(expert);
            --held_[kSmall];
            join(expert, kMain);
            items_[expert].again = 0;
            main_.push(expert);
        }
        return expert;
    }
    uint32_t of_main() {
        uint32_t expert = main_.top();
        for (; expert != kNone && items_[expert].again > 0; expert = main_.top()) {
            --items_[expert].again;
            joined_[expert] = ++clock_;
            main_.update(expert);
        }
        return expert;
    }
    void remember(uint32_t expert) {
        if (ghosts_ == ghost_room_) fade(ghost_.oldest(0));
        items_[expert].ghost = true;
        ghost_.stamp[expert] = ++clock_;
        ghost_.insert(0, expert);
        ++ghosts_;
    }
    void recall(uint32_t expert) {
        items_[expert].returns = true;
        fade(expert);
    }
    void fade(uint32_t expert) {
        items_[expert].ghost = false;
        ghost_.remove(expert);
        --ghosts_;
    }
    void enter(uint32_t expert) override { (items_[expert].queue == kMain ? main_ : small_).push(expert); }
    void leave(uint32_t expert) override { (items_[expert].queue == kMain ? main_ : small_).remove(expert); }

    uint32_t small_room_, main_room_, ghost_room_;
    std::vector<Item> items_;
    std::vector<uint64_t> joined_;        // per expert: when it joined its queue, or was last given another turn
    IndexedHeap<Earlier> small_, main_;   // their candidates
    uint32_t held_[2] = {0, 0};           // their members, pinned ones too
    RecencyLists ghost_;
    uint32_t ghosts_ = 0;
    uint64_t clock_ = 0;
    bool has_evicted_ = false;
};

const PolicyRegistration registration(
    "s3fifo", "a small queue on trial, a main one, and a ghost of who failed the trial; no argument",
    [](const PolicyShape& shape, const std::string& argument) -> std::unique_ptr<Policy> {
        expect_no_argument("s3fifo", argument);
        return std::make_unique<S3Fifo>(shape);
    });

}  // namespace
}  // namespace moestream
