// Threads that serve one shared state until they are told to stop. The state outlives them, also where they cannot be
// joined: in a child of fork they do not exist and its locks may be held for ever, so there all of it is left behind.
#pragma once
#include <unistd.h>

#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "moestream/error.h"

namespace moestream {

// State has serve(uint32_t thread), which returns once stop() was called, and a destructor that must not run while a
// thread serves.
template <class State>
class Workers {
  public:
    // Throws Error(refused) when the threads cannot be had.
    Workers(std::unique_ptr<State> state, uint32_t threads) : all_(std::make_unique<All>()), process_(getpid()) {
        all_->state = std::move(state);
        all_->threads.reserve(threads);
        try {
            for (uint32_t t = 0; t < threads; ++t) {
                all_->threads.emplace_back([state = all_->state.get(), t] { state->serve(t); });
            }
        } catch (const std::system_error& error) {
            end();
            throw Error(ErrorKind::refused, "cannot start " + std::to_string(threads) + " threads (" + error.what() +
                                                "): use fewer");
        }
    }
    ~Workers() {
        if (getpid() != process_) {
            (void)all_.release();
            return;
        }
        end();
    }
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;
    State* operator->() const { return all_->state.get(); }
    size_t threads() const { return all_->threads.size(); }

  private:
    struct All {
        std::unique_ptr<State> state;
        std::vector<std::thread> threads;
    };
    void end() {
        all_->state->stop();
        for (auto& thread : all_->threads) thread.join();
    }

    std::unique_ptr<All> all_;
    pid_t process_;
};

}  // namespace moestream
