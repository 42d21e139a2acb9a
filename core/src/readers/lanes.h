// The software queue in front of a reader's depth: two lanes of fixed size, demand before speculative.
#pragma once
#include <cstddef>
#include <vector>

#include "moestream/error.h"
#include "moestream/reader.h"

namespace moestream {

// A ring of reads; nothing is allocated after construction.
class Lane {
  public:
    explicit Lane(size_t capacity) : ring_(capacity) {}
    bool empty() const { return count_ == 0; }
    size_t size() const { return count_; }
    void push(const Read& read) {
        if (count_ == ring_.size()) throw Error(ErrorKind::internal, "a reader's queue is full");
        ring_[(first_ + count_++) % ring_.size()] = read;
    }
    Read pop() {
        const Read read = ring_[first_];
        first_ = (first_ + 1) % ring_.size();
        --count_;
        return read;
    }
    // Takes the read with this tag out; false when it is not queued here.
    bool take(uint32_t tag, Read& read) {
        for (size_t i = 0; i < count_; ++i) {
            if (ring_[(first_ + i) % ring_.size()].tag != tag) continue;
            read = ring_[(first_ + i) % ring_.size()];
            for (size_t j = i; j + 1 < count_; ++j) {
                ring_[(first_ + j) % ring_.size()] = ring_[(first_ + j + 1) % ring_.size()];
            }
            --count_;
            return true;
        }
        return false;
    }

  private:
    std::vector<Read> ring_;
    size_t first_ = 0;
    size_t count_ = 0;
};

class Lanes {
  public:
    explicit Lanes(size_t capacity) : demand_(capacity), speculative_(capacity) {}
    bool empty() const { return demand_.empty() && speculative_.empty(); }
    size_t size() const { return demand_.size() + speculative_.size(); }
    bool has_demand() const { return !demand_.empty(); }
    void push(const Read& read, Urgency urgency) {
        (urgency == Urgency::demand ? demand_ : speculative_).push(read);
    }
    Read pop() { return demand_.empty() ? speculative_.pop() : demand_.pop(); }
    bool promote(uint32_t tag) {
        Read read;
        if (!speculative_.take(tag, read)) return false;
        demand_.push(read);
        return true;
    }
    template <class Function>
    void drop_speculative(const Function& dropped) {
        while (!speculative_.empty()) dropped(speculative_.pop());
    }

  private:
    Lane demand_;
    Lane speculative_;
};

// How far a read has come, and what the next system call must ask for. Direct reads must stay aligned: after a short
// read they go on from the last whole page.
struct Progress {
    Read read;
    uint32_t done = 0;
    bool retried = false;  // EIO is tried once more: a passing fault of a path to the device

    uint32_t from() const { return done / 4096 * 4096; }
    uint64_t offset() const { return read.offset + from(); }
    void* address() const { return static_cast<char*>(read.dst) + from(); }
    uint32_t bytes() const { return read.bytes - from(); }
};

enum class Next { again, finished };

// Digests one system call's result (bytes or -errno). `finished` fills the completion.
Next advance(Progress& progress, int64_t result, ReaderCounters& counters, Completion& completion);

uint64_t monotonic_ns();

}  // namespace moestream
