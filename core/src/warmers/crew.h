// A few threads that share out one list of pieces and are waited for: `pread:TxS`, `memcpy:TxS`.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "workers.h"

namespace moestream {

class Crew {
  public:
    // `work(piece, thread)` does piece number `piece`; it must not throw. One thread: the caller's own.
    using Work = std::function<void(size_t piece, uint32_t thread)>;

    Crew(uint32_t threads, Work work);  // throws Error(refused)

    // Pieces 0..count-1 in that order, each by the first thread that is free; returns when all are done.
    void run(size_t count);

  private:
    struct State {
        explicit State(Work work) : work(std::move(work)) {}
        void serve(uint32_t thread);
        void stop();

        Work work;
        std::mutex mutex;
        std::condition_variable begun, ended;
        size_t next = 0, count = 0, left = 0;
        bool stopping = false;
    };
    Workers<State> workers_;
};

// "4x2": threads and pieces a slab; "" is 1x1. Throws Error(usage).
struct CrewShape {
    uint32_t threads = 1;
    uint32_t pieces = 1;
};
CrewShape parse_crew(const std::string& argument);

}  // namespace moestream
