#include "crew.h"

#include <charconv>
#include <utility>

#include "moestream/error.h"

namespace moestream {

Crew::Crew(uint32_t threads, Work work) : work_(std::move(work)) {
    for (uint32_t t = 0; threads > 1 && t < threads; ++t) threads_.emplace_back([this, t] { serve(t); });
}

Crew::~Crew() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    begun_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Crew::run(size_t count) {
    if (threads_.empty()) {
        for (size_t piece = 0; piece < count; ++piece) work_(piece, 0);
        return;
    }
    std::unique_lock lock(mutex_);
    next_ = 0;
    count_ = left_ = count;
    begun_.notify_all();
    ended_.wait(lock, [this] { return left_ == 0; });
}

void Crew::serve(uint32_t thread) {
    std::unique_lock lock(mutex_);
    while (true) {
        begun_.wait(lock, [this] { return stop_ || next_ < count_; });
        if (stop_) return;
        const size_t piece = next_++;
        lock.unlock();
        work_(piece, thread);
        lock.lock();
        if (--left_ == 0) ended_.notify_one();
    }
}

CrewShape parse_crew(const std::string& argument) {
    CrewShape shape;
    if (argument.empty()) return shape;
    const char* end = argument.data() + argument.size();
    auto [at, error] = std::from_chars(argument.data(), end, shape.threads);
    if (error == std::errc() && at != end && *at == 'x') {
        const auto rest = std::from_chars(at + 1, end, shape.pieces);
        at = rest.ptr;
        error = rest.ec;
    }
    if (error != std::errc() || at != end || shape.threads < 1 || shape.threads > 64 || shape.pieces < 1 ||
        shape.pieces > 8) {
        throw Error(ErrorKind::usage, "threads and pieces are written TxS, 1..64 and 1..8, not '" + argument + "'");
    }
    return shape;
}

}  // namespace moestream
