#include "moestream/fault_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>

#include "moestream/geometry.h"

namespace moestream {
namespace {

constexpr size_t kNowhere = SIZE_MAX;

}  // namespace

// Slots are linked once and never freed, so the handler can walk them at any moment; one whose `bytes` is 0 is free.
struct FaultWatch::Slot {
    std::atomic<size_t> bytes{0};
    std::atomic<uintptr_t> base{0};
    std::atomic<size_t> failed_at{kNowhere};
    Slot* next = nullptr;
};

struct FaultHandler {
    static inline std::atomic<FaultWatch::Slot*> first{nullptr};
    static inline std::mutex mutex;  // of whoever takes slots and sets handlers; never of the handler
    // Who is asked about what is not ours. Two, for the handler may read one while the other is written.
    static inline struct sigaction before[2];
    static inline std::atomic<int> current{0};

    static FaultWatch::Slot* find(uintptr_t address) {
        for (auto* slot = first.load(std::memory_order_acquire); slot != nullptr; slot = slot->next) {
            const size_t bytes = slot->bytes.load(std::memory_order_acquire);
            if (address - slot->base.load(std::memory_order_relaxed) < bytes) return slot;
        }
        return nullptr;
    }

    // True: the page is there now, of zeros.
    static bool mend(const siginfo_t& info) {
        if (info.si_code <= 0) return false;  // somebody's kill, which names no address
        const auto address = reinterpret_cast<uintptr_t>(info.si_addr);
        auto* slot = find(address);
        if (slot == nullptr) return false;
        const uintptr_t page = address & ~uintptr_t{kPage - 1};
        // The plain system call: the library's may be somebody's own, and do more than a handler can.
        const long at = syscall(SYS_mmap, page, kPage, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS,
                                -1, 0);
        if (at == -1) return false;
        size_t none = kNowhere;
        slot->failed_at.compare_exchange_strong(none, address - slot->base.load(std::memory_order_relaxed));
        return true;
    }

    static void pass_on(int number, siginfo_t* info, void* context) {
        const struct sigaction& other = before[current.load(std::memory_order_acquire)];
        const bool plain = (other.sa_flags & SA_SIGINFO) == 0;
        if (plain && (other.sa_handler == SIG_DFL || other.sa_handler == SIG_IGN)) {
            signal(number, SIG_DFL);  // a fault comes again by itself
            if (info->si_code <= 0) raise(number);
            return;
        }
        if (plain) {
            other.sa_handler(number);
        } else {
            other.sa_sigaction(number, info, context);
        }
        // One that raises the signal itself, when it has said what it had to, means the end: not to be asked again.
        sigset_t waiting;
        sigpending(&waiting);
        if (sigismember(&waiting, number) == 1) signal(number, SIG_DFL);
    }

    static void handle(int number, siginfo_t* info, void* context) {
        const int error = errno;
        if (!mend(*info)) pass_on(number, info, context);
        errno = error;
    }

    static void install() {
        const std::lock_guard lock(mutex);
        struct sigaction now {};
        sigaction(SIGBUS, nullptr, &now);
        if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == &handle) return;
        const int other = 1 - current.load(std::memory_order_relaxed);
        before[other] = now;
        current.store(other, std::memory_order_release);
        struct sigaction ours {};
        ours.sa_sigaction = &handle;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&ours.sa_mask);
        sigaction(SIGBUS, &ours, nullptr);
    }
};

FaultWatch::FaultWatch(void* base, size_t bytes) {
    stay_in_front();
    const std::lock_guard lock(FaultHandler::mutex);
    slot_ = FaultHandler::first.load(std::memory_order_relaxed);
    while (slot_ != nullptr && slot_->bytes.load(std::memory_order_relaxed) != 0) slot_ = slot_->next;
    const bool made = slot_ == nullptr;
    if (made) slot_ = new Slot;
    slot_->base.store(reinterpret_cast<uintptr_t>(base), std::memory_order_relaxed);
    slot_->failed_at.store(kNowhere, std::memory_order_relaxed);
    slot_->bytes.store(bytes, std::memory_order_release);
    if (!made) return;
    slot_->next = FaultHandler::first.load(std::memory_order_relaxed);
    FaultHandler::first.store(slot_, std::memory_order_release);
}

FaultWatch::~FaultWatch() { slot_->bytes.store(0, std::memory_order_release); }

std::optional<size_t> FaultWatch::failed_at() const {
    const size_t at = slot_->failed_at.load(std::memory_order_acquire);
    return at == kNowhere ? std::nullopt : std::optional(at);
}

void FaultWatch::stay_in_front() { FaultHandler::install(); }

}  // namespace moestream
