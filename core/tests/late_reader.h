// "late": a reader whose reads come back as late and in as odd an order as the contract allows, and which spoils every
// destination until then: who looks at a slab too early, or moves its pages, sees it every time and not by chance.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "moestream/reader.h"

namespace moestream::test {

class LateReader : public Reader {
  public:
    void submit(const Read& read, Urgency urgency) override {
        std::memset(read.dst, kSpoiled, read.bytes);
        waiting_.push_back({read, urgency});
    }
    size_t reap(std::span<Completion> out, bool wait) override {
        size_t count = 0;
        while (count < out.size() && !waiting_.empty() && (random_() % 2 == 0 || (wait && count == 0))) {
            const size_t chosen = random_() % waiting_.size();
            out[count++] = read(waiting_[chosen].read);
            waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(chosen));
        }
        return count;
    }
    void drop_speculative(const std::function<void(const Read&)>& dropped) override {
        for (size_t i = 0; i < waiting_.size();) {
            const bool started = waiting_[i].urgency == Urgency::demand || random_() % 4 == 0;
            if (started) {
                ++i;
                continue;
            }
            dropped(waiting_[i].read);
            waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
        }
    }
    void promote(uint32_t tag) override {
        for (auto& waiting : waiting_) {
            if (waiting.read.tag == tag) waiting.urgency = Urgency::demand;
        }
    }
    size_t in_flight() const override { return waiting_.size(); }
    uint32_t depth() const override { return 1; }
    const ReaderCounters& counters() const override { return counters_; }

  private:
    static constexpr unsigned char kSpoiled = 0x5a;
    struct Waiting {
        Read read;
        Urgency urgency;
    };
    static Completion read(const Read& read) {
        // A device would write to the pages that were there at the start, wherever they have been moved since.
        const auto* byte = static_cast<const unsigned char*>(read.dst);
        CHECK(std::all_of(byte, byte + read.bytes, [](unsigned char value) { return value == kSpoiled; }));
        const ssize_t got = pread(read.fd, read.dst, read.bytes, static_cast<off_t>(read.offset));
        return {read.tag, got == static_cast<ssize_t>(read.bytes) ? 0 : ENODATA, read.offset, 0};
    }

    std::vector<Waiting> waiting_;
    std::mt19937 random_{11};
    ReaderCounters counters_;
};

inline const ReaderRegistration late_reader("late", "late, in any order, onto spoiled memory",
                                            [](const ReaderOptions&, const std::string&) {
                                                return std::make_unique<LateReader>();
                                            });

}  // namespace moestream::test
