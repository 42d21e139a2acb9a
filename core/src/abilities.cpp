#include "moestream/abilities.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "moestream/error.h"
#include "readers/ring.h"
#include "stores/pages.h"
#include "warmers/residency.h"

namespace moestream {
namespace {

std::string ring_refused() {
    try {
        const Ring ring(1);
        return "";
    } catch (const Error& error) {
        return error.what();
    }
}

std::string counting_refused() {
    const std::string own = "/proc/self/exe";
    const int fd = open(own.c_str(), O_RDONLY | O_CLOEXEC);
    const std::string why = cachestat_refused(own, fd);
    if (fd >= 0) close(fd);
    return why;
}

void* wait_for(void* enough) {
    static_cast<std::atomic<bool>*>(enough)->wait(false);
    return nullptr;
}

}  // namespace

std::map<std::string, std::string> abilities() {
    return {{"io_uring", ring_refused()},
            {"cachestat", counting_refused()},
            {"mincore", mincore_refused()},
            {"mremap", move_refused()},
            {"populate", populate_refused()}};
}

uint32_t startable_threads(uint32_t count) {
    std::atomic<bool> enough = false;
    std::vector<pthread_t> threads;
    threads.reserve(count);
    pthread_t thread{};
    while (threads.size() < count && pthread_create(&thread, nullptr, wait_for, &enough) == 0) threads.push_back(thread);
    enough = true;
    enough.notify_all();
    for (const pthread_t started : threads) pthread_join(started, nullptr);
    return static_cast<uint32_t>(threads.size());
}

}  // namespace moestream
