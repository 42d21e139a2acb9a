// What every reader shares: the software queue in front of its depth, and what a system call's result means.
//
// A *job* is one submitted read. It waits in one of two lanes (demand before speculative), is handed out as one or
// more *pieces* (see ReaderOptions), each worth one system call at a time, and becomes one completion
// when its last piece has finished. All room is taken at construction. Not thread-safe: `threads` locks around it.
#pragma once
#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "moestream/reader.h"

namespace moestream {

inline constexpr uint32_t kDirectAlign = 4096;

uint64_t monotonic_ns();
// The number in a member's argument; `fallback` when there is none. Throws Error(usage) outside 1..most.
uint32_t parse_count(const std::string& argument, uint32_t fallback, uint32_t most, const char* member);

// A started part of a read, and what its next system call must ask for. A direct read must stay aligned, so after a
// short one it goes on from the last whole page.
struct Piece {
    Read read;  // offset, dst and bytes are the piece's own
    uint32_t job = 0;
    uint32_t done = 0;     // bytes from its start that are there
    uint32_t barren = 0;   // results in a row that brought nothing
    bool retried = false;  // EIO is tried once more: a passing fault of a path to the device

    uint32_t from() const { return done / kDirectAlign * kDirectAlign; }
    uint64_t offset() const { return read.offset + from(); }
    void* address() const { return static_cast<char*>(read.dst) + from(); }
    uint32_t bytes() const { return read.bytes - from(); }
};

enum class Next { again, finished };

class Queue {
  public:
    explicit Queue(const ReaderOptions& options);

    void push(const Read& read, Urgency urgency);  // throws Error(internal) when max_queued are in flight
    bool startable() const { return lane(Urgency::demand).first != kEnd || lane(Urgency::speculative).first != kEnd; }
    bool demand_startable() const { return lane(Urgency::demand).first != kEnd; }
    Piece start();  // only when startable()
    // Digests one system call's result (bytes or -errno). `finished`: the piece is no longer the caller's.
    Next digest(Piece& piece, int64_t result);

    size_t finished() const { return done_count_; }
    size_t take(std::span<Completion> out);  // in the order they finished
    size_t in_flight() const { return jobs_.size() - free_.size() + done_count_; }

    bool promote(uint32_t tag);  // false when it is not in the speculative lane
    template <class Function>
    void drop_speculative(const Function& dropped) {
        for (uint32_t job = lane(Urgency::speculative).first; job != kEnd;) {
            const uint32_t next = jobs_[job].next;
            if (jobs_[job].started == 0) {
                const Read read = jobs_[job].read;
                unlink(job);
                free_.push_back(job);
                dropped(read);
            }
            job = next;
        }
    }
    void forget_queued();  // for destructors: started pieces finish, nothing else starts

    ReaderCounters counters;  // the queue keeps reads, bytes, pieces and retries; the reader the times

  private:
    static constexpr uint32_t kEnd = UINT32_MAX;
    struct Job {
        Read read;
        uint32_t started = 0;  // bytes handed out as pieces
        uint32_t pieces = 0;   // of them, still out
        int32_t error = 0;
        uint64_t fail_offset = 0;
        Urgency urgency = Urgency::demand;
        uint32_t next = kEnd;  // in its lane, while it has bytes to hand out
        uint32_t previous = kEnd;
    };
    struct Lane {
        uint32_t first = kEnd;
        uint32_t last = kEnd;
    };
    const Lane& lane(Urgency urgency) const { return lanes_[static_cast<size_t>(urgency)]; }
    Lane& lane(Urgency urgency) { return lanes_[static_cast<size_t>(urgency)]; }
    void append(uint32_t job, Urgency urgency);
    void unlink(uint32_t job);
    void finish(const Piece& piece, int32_t error);
    void complete(uint32_t job);

    std::vector<Job> jobs_;
    std::vector<uint32_t> free_;
    std::vector<Completion> done_;  // a ring
    size_t done_first_ = 0;
    size_t done_count_ = 0;
    std::array<Lane, 2> lanes_;
    uint64_t split_bytes_;
    uint64_t pieces_;
};

}  // namespace moestream
