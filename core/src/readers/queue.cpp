#include "readers/queue.h"

#include <time.h>

#include <algorithm>
#include <cerrno>
#include <charconv>

namespace moestream {
namespace {

constexpr int32_t kAgain = -1;
// A file that answers EAGAIN for ever is reported rather than spun on.
constexpr uint32_t kMostBarren = 1000;

// What a result means for its piece: kAgain, 0 (all bytes are there) or the errno to report.
int32_t judge(Piece& piece, int64_t result) {
    if (result == -EINTR) return kAgain;
    if (result == -EAGAIN) return ++piece.barren < kMostBarren ? kAgain : EAGAIN;
    if (result == -EIO && !piece.retried) {
        piece.retried = true;
        return kAgain;
    }
    if (result < 0) return static_cast<int32_t>(-result);
    const uint32_t reached = piece.from() + static_cast<uint32_t>(result);
    if (reached >= piece.read.bytes) {
        piece.done = piece.read.bytes;
        return 0;
    }
    // The file ends here: nothing came, or from the last whole page only what was known already.
    if (result == 0 || reached == piece.done) return ENODATA;
    if (reached < piece.done) return ++piece.barren < kMostBarren ? kAgain : EAGAIN;
    piece.done = reached;
    piece.barren = 0;
    return kAgain;
}

}  // namespace

uint64_t monotonic_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

uint32_t parse_count(const std::string& argument, uint32_t fallback, uint32_t most, const char* member) {
    if (argument.empty()) return fallback;
    uint32_t count = 0;
    const char* last = argument.data() + argument.size();
    const auto [end, error] = std::from_chars(argument.data(), last, count);
    if (error == std::errc() && end == last && count >= 1 && count <= most) return count;
    throw Error(ErrorKind::usage, std::string(member) + ":N takes a number from 1 to " + std::to_string(most) +
                                      ", not '" + argument + "'");
}

Queue::Queue(const ReaderOptions& options)
    : jobs_(options.max_queued), done_(options.max_queued), pieces_(std::max(1u, options.pieces)) {
    if (options.max_queued == 0) throw Error(ErrorKind::usage, "a reader needs room for at least one read");
    split_bytes_ = options.split_bytes == 0 ? UINT32_MAX : std::min<uint64_t>(options.split_bytes, UINT32_MAX);
    free_.reserve(options.max_queued);
    for (uint32_t job = options.max_queued; job-- > 0;) free_.push_back(job);
}

void Queue::push(const Read& read, Urgency urgency) {
    if (in_flight() >= jobs_.size()) {
        throw Error(ErrorKind::internal, "more than " + std::to_string(jobs_.size()) + " reads in flight");
    }
    const uint32_t job = free_.back();
    free_.pop_back();
    jobs_[job] = Job{};
    jobs_[job].read = read;
    append(job, urgency);
}

Piece Queue::start() {
    const uint32_t number = demand_startable() ? lane(Urgency::demand).first : lane(Urgency::speculative).first;
    Job& job = jobs_[number];
    Piece piece;
    piece.job = number;
    piece.read = job.read;
    piece.read.offset += job.started;
    piece.read.dst = static_cast<char*>(job.read.dst) + job.started;
    // In page multiples, so that the pieces of a direct read stay aligned.
    const uint64_t share = std::min(split_bytes_, (job.read.bytes + pieces_ - 1) / pieces_);
    const uint64_t most = (share + kDirectAlign - 1) / kDirectAlign * kDirectAlign;
    piece.read.bytes = static_cast<uint32_t>(std::min<uint64_t>(most, job.read.bytes - job.started));
    job.started += piece.read.bytes;
    ++job.pieces;
    ++counters.pieces;
    if (job.started == job.read.bytes) unlink(number);
    return piece;
}

Next Queue::digest(Piece& piece, int64_t result) {
    const int32_t error = judge(piece, result);
    if (error == kAgain) {
        ++counters.retries;
        return Next::again;
    }
    finish(piece, error);
    return Next::finished;
}

void Queue::finish(const Piece& piece, int32_t error) {
    Job& job = jobs_[piece.job];
    --job.pieces;
    if (error != 0) {
        // Of several failed pieces the first in the file is reported, whichever came back first.
        const uint64_t at = piece.read.offset + piece.done;
        if (job.error == 0 || at < job.fail_offset) {
            job.error = error;
            job.fail_offset = at;
        }
        if (job.started < job.read.bytes) {
            unlink(piece.job);
            job.started = job.read.bytes;
        }
    }
    if (job.pieces == 0 && job.started == job.read.bytes) complete(piece.job);
}

void Queue::complete(uint32_t number) {
    const Job& job = jobs_[number];
    if (job.error == 0) {
        ++counters.reads;
        counters.bytes += job.read.bytes;
    }
    done_[(done_first_ + done_count_++) % done_.size()] = {job.read.tag, job.error, job.fail_offset, monotonic_ns()};
    free_.push_back(number);
}

size_t Queue::take(std::span<Completion> out) {
    const size_t count = std::min(out.size(), done_count_);
    for (size_t i = 0; i < count; ++i) out[i] = done_[(done_first_ + i) % done_.size()];
    done_first_ = (done_first_ + count) % done_.size();
    done_count_ -= count;
    return count;
}

bool Queue::promote(uint32_t tag) {
    for (uint32_t job = lane(Urgency::speculative).first; job != kEnd; job = jobs_[job].next) {
        if (jobs_[job].read.tag != tag) continue;
        unlink(job);
        append(job, Urgency::demand);
        return true;
    }
    return false;
}

void Queue::forget_queued() {
    for (const Urgency urgency : {Urgency::demand, Urgency::speculative}) {
        while (lane(urgency).first != kEnd) {
            const uint32_t number = lane(urgency).first;
            Job& job = jobs_[number];
            unlink(number);
            job.started = job.read.bytes;
            if (job.pieces == 0) free_.push_back(number);
        }
    }
}

void Queue::append(uint32_t number, Urgency urgency) {
    Lane& to = lane(urgency);
    Job& job = jobs_[number];
    job.urgency = urgency;
    job.next = kEnd;
    job.previous = to.last;
    (to.last == kEnd ? to.first : jobs_[to.last].next) = number;
    to.last = number;
}

void Queue::unlink(uint32_t number) {
    Job& job = jobs_[number];
    Lane& from = lane(job.urgency);
    (job.previous == kEnd ? from.first : jobs_[job.previous].next) = job.next;
    (job.next == kEnd ? from.last : jobs_[job.next].previous) = job.previous;
    job.next = job.previous = kEnd;
}

}  // namespace moestream
