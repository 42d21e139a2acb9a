// A reader that does its work in the caller's thread: demand reads in submit, speculative ones when there is nothing
// better to do in reap.
#pragma once
#include <algorithm>
#include <vector>

#include "lanes.h"

namespace moestream {

class Immediate : public Reader {
  public:
    explicit Immediate(const ReaderOptions& options) : lanes_(options.max_queued) { done_.reserve(options.max_queued); }

    void submit(const Read& read, Urgency urgency) override {
        if (urgency == Urgency::speculative) {
            lanes_.push(read, urgency);
            return;
        }
        const uint64_t start = monotonic_ns();
        done_.push_back(perform(read));
        counters_.submit_ns += monotonic_ns() - start;
    }
    size_t reap(std::span<Completion> out, bool wait) override {
        if (done_.empty() && wait && !lanes_.empty()) done_.push_back(perform(lanes_.pop()));
        const size_t count = std::min(out.size(), done_.size());
        std::copy_n(done_.end() - static_cast<ptrdiff_t>(count), count, out.begin());
        done_.resize(done_.size() - count);
        return count;
    }
    void drop_speculative(const std::function<void(const Read&)>& dropped) override {
        lanes_.drop_speculative(dropped);
    }
    void promote(uint32_t tag) override {
        if (lanes_.promote(tag)) done_.push_back(perform(lanes_.pop()));
    }
    size_t in_flight() const override { return lanes_.size() + done_.size(); }
    const ReaderCounters& counters() const override { return counters_; }

  protected:
    virtual Completion perform(const Read& read) = 0;
    ReaderCounters counters_;

  private:
    Lanes lanes_;
    std::vector<Completion> done_;
};

}  // namespace moestream
