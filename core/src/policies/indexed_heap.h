// A binary heap of the numbers 0..n-1 in two arrays, with the place of each known: any member can be removed or
// moved in O(log n), and nothing is allocated after construction. `before(a, b)` says that a comes out before b;
// it must be a strict total order, and after a change of what it compares, update() must be called.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "moestream/slab_index.h"

namespace moestream {

template <class Before>
class IndexedHeap {
  public:
    IndexedHeap(uint32_t n, Before before) : place_(n, kNone), before_(std::move(before)) { heap_.reserve(n); }

    bool contains(uint32_t item) const { return place_[item] != kNone; }
    uint32_t top() const { return heap_.empty() ? kNone : heap_[0]; }

    void push(uint32_t item) {
        heap_.push_back(item);
        rise(static_cast<uint32_t>(heap_.size() - 1), item);
    }
    void remove(uint32_t item) {
        const uint32_t hole = place_[item], last = heap_.back();
        heap_.pop_back();
        place_[item] = kNone;
        if (last == item) return;
        place(hole, last);
        update(last);
    }
    void update(uint32_t item) {
        const uint32_t at = place_[item];
        if (at > 0 && before_(item, heap_[(at - 1) / 2])) {
            rise(at, item);
        } else {
            sink(at, item);
        }
    }

    // After any number of changes of what `before` compares.
    void rebuild() {
        for (auto at = static_cast<uint32_t>(heap_.size() / 2); at-- > 0;) sink(at, heap_[at]);
    }

  private:
    void place(uint32_t at, uint32_t item) {
        heap_[at] = item;
        place_[item] = at;
    }
    void rise(uint32_t at, uint32_t item) {
        for (; at > 0 && before_(item, heap_[(at - 1) / 2]); at = (at - 1) / 2) place(at, heap_[(at - 1) / 2]);
        place(at, item);
    }
    void sink(uint32_t at, uint32_t item) {
        const auto size = static_cast<uint32_t>(heap_.size());
        for (uint32_t child = 2 * at + 1; child < size; child = 2 * at + 1) {
            if (child + 1 < size && before_(heap_[child + 1], heap_[child])) ++child;
            if (!before_(heap_[child], item)) break;
            place(at, heap_[child]);
            at = child;
        }
        place(at, item);
    }
    std::vector<uint32_t> heap_;
    std::vector<uint32_t> place_;  // per item: where it is in heap_, or kNone
    Before before_;
};

// The order of a queue whose members may be taken out and put back in their places: by a number given on joining.
struct Earlier {
    const std::vector<uint64_t>* joined;  // per item; no two alike
    bool operator()(uint32_t a, uint32_t b) const { return (*joined)[a] < (*joined)[b]; }
};

}  // namespace moestream
