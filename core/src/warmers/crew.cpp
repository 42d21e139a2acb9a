#include "crew.h"

#include <charconv>
#include <utility>

#include "moestream/error.h"

namespace moestream {

Crew::Crew(uint32_t threads, Work work)
    : workers_(std::make_unique<State>(std::move(work)), threads > 1 ? threads : 0) {}

void Crew::run(size_t count) {
    if (workers_.threads() == 0) {
        for (size_t piece = 0; piece < count; ++piece) workers_->work(piece, 0);
        return;
    }
    std::unique_lock lock(workers_->mutex);
    workers_->next = 0;
    workers_->count = workers_->left = count;
    workers_->begun.notify_all();
    workers_->ended.wait(lock, [this] { return workers_->left == 0; });
}

void Crew::State::serve(uint32_t thread) {
    std::unique_lock lock(mutex);
    while (true) {
        begun.wait(lock, [this] { return stopping || next < count; });
        if (stopping) return;
        const size_t piece = next++;
        lock.unlock();
        work(piece, thread);
        lock.lock();
        if (--left == 0) ended.notify_one();
    }
}

void Crew::State::stop() {
    {
        const std::lock_guard lock(mutex);
        stopping = true;
    }
    begun.notify_all();
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
