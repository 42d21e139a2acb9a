// How bytes travel from a file to memory that is already there.
//
// A reader is used by one thread at a time: the one that runs the hook. `uring` shares no lock with a completion;
// `threads` has one, held for a few instructions. The reader owns its queue and its threads or ring; it never owns
// the destination: the caller promises that `dst` stays mapped and unmoved until the tag is reaped or dropped.
// Destination, offset and length are page multiples when the file was opened with O_DIRECT.
//
// The destructor forgets what has not been started and waits for what has: afterwards nothing writes to any `dst`.
// A child of fork() may destroy the reader it inherited, which then leaves the parent's reads alone, and nothing else.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "moestream/registry.h"

namespace moestream {

struct Read {
    int fd = -1;
    uint32_t tag = 0;      // the caller's name for it, unique among those in flight
    uint64_t offset = 0;
    void* dst = nullptr;
    uint32_t bytes = 0;
};

struct Completion {
    uint32_t tag = 0;
    int32_t error = 0;       // 0: all bytes are there; else a positive errno (ENODATA: the file ended early)
    uint64_t fail_offset = 0;  // file offset at which it failed, when error != 0
    uint64_t ready_ns = 0;  // CLOCK_MONOTONIC when it was seen complete
};

enum class Urgency : uint8_t { demand, speculative };

struct ReaderCounters {
    uint64_t reads = 0;          // requests completed without error
    uint64_t bytes = 0;          // bytes of them
    uint64_t pieces = 0;         // parts that reads were started in: as many as reads where none is cut
    uint64_t submit_ns = 0;      // caller's time inside submit()
    uint64_t wait_ns = 0;        // caller's time inside reap(wait=true) until a completion was there
    uint64_t retries = 0;        // system calls repeated: short reads, EINTR, EAGAIN, EIO the first time
};

class Reader {
  public:
    virtual ~Reader() = default;
    // Queues a read and starts it as soon as the depth allows. Demand reads overtake queued speculative ones.
    // Never blocks for a read to finish, except in `sync`. Allocates nothing beyond what `max_queued` reserved.
    // Throws Error(internal) when max_queued are in flight, Error(io) when the kernel refuses a ring it has granted.
    virtual void submit(const Read& read, Urgency urgency) = 0;
    // Takes up to out.size() completions; with wait=true sleeps until at least one is there (returns 0 at once when
    // nothing is in flight), in the order they finished. Short reads are continued, EINTR/EAGAIN repeated, inside;
    // EIO is tried once more before it is reported.
    virtual size_t reap(std::span<Completion> out, bool wait) = 0;
    // Drops speculative reads that have not been started; each is passed to `dropped` and will not be reaped. `dropped`
    // must not call the reader.
    virtual void drop_speculative(const std::function<void(const Read&)>& dropped) = 0;
    // Turns a speculative read that is still queued into a demand read (no effect when it is already started).
    virtual void promote(uint32_t tag) = 0;
    virtual size_t in_flight() const = 0;  // submitted and not yet reaped or dropped
    virtual uint32_t depth() const = 0;    // pieces under way at once, at most
    virtual const ReaderCounters& counters() const = 0;  // as of the last submit or reap
};

struct ReaderOptions {
    uint32_t max_queued = 1024;  // most reads ever in flight (not yet reaped or dropped) at once
    uint64_t split_bytes = 0;    // a larger read is cut into pieces of this size, rounded up to pages; 0: never
    uint32_t pieces = 1;         // every read is cut into this many parts of whole pages, fewer where it has fewer; "uring:8x4" sets it
};

using ReaderFactory = std::function<std::unique_ptr<Reader>(const ReaderOptions&, const std::string& argument)>;
using ReaderRegistration = Registration<ReaderFactory>;
// "uring:24", "threads:4x2" (each read in two pieces), "sync"; "null" reads nothing and is for replay only. Throws
// Error(usage), or Error(unsupported) when the kernel refuses io_uring: the text names the remedy.
std::unique_ptr<Reader> make_reader(std::string_view text, const ReaderOptions& options);

}  // namespace moestream
