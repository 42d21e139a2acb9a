// The reader over an io_uring, with the ring as a parameter: tests hand in one whose completions say what they like.
//
// A Ring is what ring.h declares: push_read, submit, submit_wait, pop and inherited.
#pragma once
#include <vector>

#include "readers/queue.h"

namespace moestream {

template <class Ring>
class Uring : public Reader {
  public:
    Uring(const ReaderOptions& options, uint32_t depth) : ring_(depth), queue_(options), started_(depth) {
        free_.reserve(depth);
        for (uint32_t slot = depth; slot-- > 0;) free_.push_back(slot);
    }
    ~Uring() override {
        if (ring_.inherited()) return;
        queue_.forget_queued();
        // The kernel may still write into destinations: nothing is torn down under it. Should the kernel refuse even
        // to be waited for, ending the process (an exception leaves a destructor) is better than freed memory written.
        while (free_.size() < started_.size()) {
            ring_.submit_wait();
            collect();
        }
    }

    void submit(const Read& read, Urgency urgency) override {
        const uint64_t start = monotonic_ns();
        queue_.push(read, urgency);
        start_queued();
        queue_.counters.submit_ns += monotonic_ns() - start;
    }

    size_t reap(std::span<Completion> out, bool wait) override {
        collect();
        if (wait && !out.empty() && queue_.finished() == 0 && queue_.in_flight() > 0) {
            const uint64_t start = monotonic_ns();
            while (queue_.finished() == 0) {
                ring_.submit_wait();
                collect();
            }
            queue_.counters.wait_ns += monotonic_ns() - start;
        }
        return queue_.take(out);
    }

    void drop_speculative(const std::function<void(const Read&)>& dropped) override {
        queue_.drop_speculative(dropped);
    }
    void promote(uint32_t tag) override { queue_.promote(tag); }
    size_t in_flight() const override { return queue_.in_flight(); }
    uint32_t depth() const override { return static_cast<uint32_t>(started_.size()); }
    const ReaderCounters& counters() const override { return queue_.counters; }

  private:
    void push(uint64_t slot) {
        const Piece& piece = started_[slot];
        ring_.push_read(piece.read.fd, piece.offset(), piece.address(), piece.bytes(), slot);
    }
    // One system call for all that can start.
    void start_queued() {
        while (!free_.empty() && queue_.startable()) {
            const uint32_t slot = free_.back();
            free_.pop_back();
            started_[slot] = queue_.start();
            push(slot);
        }
        ring_.submit();
    }
    void collect() {
        uint64_t slot = 0;
        int32_t result = 0;
        while (ring_.pop(slot, result)) {
            if (queue_.digest(started_[slot], result) == Next::again) {
                push(slot);
            } else {
                free_.push_back(static_cast<uint32_t>(slot));
            }
        }
        start_queued();
    }

    Ring ring_;
    Queue queue_;
    std::vector<Piece> started_;  // by the number the kernel gives back
    std::vector<uint32_t> free_;
};

}  // namespace moestream
