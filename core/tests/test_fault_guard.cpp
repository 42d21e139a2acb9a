// Pages of a mapped file that are gone: zeros and a note where they are watched; where they are not, whoever was asked
// before is asked still, and a process that asked nobody ends as it would have.
#include "moestream/fault_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "store_fixture.h"

using namespace moestream;
using namespace moestream::test;

namespace {

constexpr size_t kPages = 64;

// A file of 64 pages, mapped; cut to half of them when asked.
struct MappedFile {
    explicit MappedFile(int flags = MAP_SHARED) : file(kPages * kPage, 5) {
        const int fd = open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
        base = static_cast<char*>(mmap(nullptr, kPages * kPage, PROT_READ | (flags == MAP_PRIVATE ? PROT_WRITE : 0), flags, fd, 0));
        close(fd);
        CHECK(base != MAP_FAILED);
    }
    ~MappedFile() { munmap(base, kPages * kPage); }
    void halve() const { file.cut(kPages / 2 * kPage); }
    char* page(size_t number) const { return base + number * kPage; }
    char at(size_t byte) const { return static_cast<volatile char*>(base)[byte]; }

    NamedFile file;
    char* base = nullptr;
};

std::atomic<int> asked{0};

// Somebody's handler, who mends what it is asked about.
void mend(int, siginfo_t* info, void*) {
    ++asked;
    if (info->si_code <= 0) return;
    void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(info->si_addr) & ~(kPage - 1));
    mmap(page, kPage, PROT_READ, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

// One that says something and asks for the end, as Python's faulthandler does.
void complain(int number) {
    ++asked;
    raise(number);
}

void set_handler(void (*handler)(int, siginfo_t*, void*)) {
    struct sigaction action {};
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, nullptr);
}

// The signal that ends a child which does this, or 0.
int ends_with(const std::function<void()>& body) {
    const pid_t child = fork();
    if (child == 0) {
        body();
        _exit(failures() != 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

void test_zeros_and_a_note() {
    for (const int flags : {MAP_SHARED, MAP_PRIVATE}) {
        const MappedFile mapped(flags);
        const FaultWatch watch(mapped.base, kPages * kPage);
        CHECK(!watch.failed_at());
        mapped.halve();
        CHECK_EQ(mapped.at(100), mapped.file.contents[100]);
        CHECK(!watch.failed_at());
        const size_t lost = 40 * kPage + 123;
        CHECK_EQ(mapped.at(lost), 0);
        CHECK(watch.failed_at() == lost);
        CHECK_EQ(mapped.at(50 * kPage), 0);
        CHECK(watch.failed_at() == lost);  // the first
        CHECK_EQ(mapped.at(31 * kPage), mapped.file.contents[31 * kPage]);
        mapped.page(60)[1] = flags == MAP_PRIVATE ? 7 : mapped.page(60)[1];
        mapped.file.restore();
        CHECK_EQ(mapped.at(lost), 0);  // for good: nobody is to take one page for the file's, the next for none
    }
}

void test_many_threads() {
    const MappedFile mapped;
    const FaultWatch watch(mapped.base, kPages * kPage);
    mapped.halve();
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&] {
            for (size_t page = kPages; page-- > 0;) {
                const char expected = page < kPages / 2 ? mapped.file.contents[page * kPage] : '\0';
                wrong += mapped.at(page * kPage) != expected;
            }
        });
    }
    for (auto& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0);
    CHECK(watch.failed_at() >= kPages / 2 * kPage);
}

// Watches come and go while another thread's pages fail.
void test_watches_come_and_go() {
    const MappedFile mapped;
    const FaultWatch watch(mapped.base, kPages * kPage);
    mapped.halve();
    char other_pages[2 * kPage];
    std::thread other([&] {
        for (int round = 0; round < 200; ++round) {
            const FaultWatch first(&round, sizeof round), second(&other_pages, sizeof other_pages);
            CHECK(!first.failed_at() && !second.failed_at());
        }
    });
    for (size_t page = kPages / 2; page < kPages; ++page) CHECK_EQ(mapped.at(page * kPage), 0);
    other.join();
    CHECK(watch.failed_at() == kPages / 2 * kPage);
}

void test_what_is_not_watched_is_anothers() {
    CHECK_EQ(ends_with([] {
                 set_handler(&mend);
                 const MappedFile ours, theirs;
                 auto watch = std::make_unique<FaultWatch>(ours.base, kPages * kPage);
                 ours.halve();
                 theirs.halve();
                 CHECK_EQ(theirs.at(40 * kPage), 0);
                 CHECK_EQ(asked.load(), 1);
                 CHECK_EQ(ours.at(40 * kPage), 0);
                 CHECK_EQ(asked.load(), 1);
                 raise(SIGBUS);  // a signal that names no address is not ours
                 raise(SIGBUS);
                 CHECK_EQ(asked.load(), 3);
                 watch.reset();
                 CHECK_EQ(ours.at(41 * kPage), 0);
                 CHECK_EQ(asked.load(), 4);
             }),
             0);
}

void test_one_who_comes_later_is_asked_second() {
    CHECK_EQ(ends_with([] {
                 const MappedFile ours, theirs;
                 const FaultWatch watch(ours.base, kPages * kPage);
                 set_handler(&mend);
                 FaultWatch::stay_in_front();
                 FaultWatch::stay_in_front();
                 ours.halve();
                 theirs.halve();
                 CHECK_EQ(ours.at(40 * kPage), 0);
                 CHECK_EQ(asked.load(), 0);
                 CHECK_EQ(theirs.at(40 * kPage), 0);
                 CHECK_EQ(asked.load(), 1);
             }),
             0);
}

void test_the_end_is_the_end() {
    const auto touch_theirs = [] {
        const MappedFile ours, theirs;
        const FaultWatch watch(ours.base, kPages * kPage);
        theirs.halve();
        theirs.at(40 * kPage);
    };
    CHECK_EQ(ends_with([&] {
                 signal(SIGBUS, SIG_DFL);  // a sanitizer has set its own
                 touch_theirs();
             }),
             SIGBUS);
    CHECK_EQ(ends_with([&] {
                 signal(SIGBUS, &complain);
                 touch_theirs();
             }),
             SIGBUS);
    CHECK_EQ(ends_with([] {
                 signal(SIGBUS, SIG_DFL);
                 const MappedFile ours;
                 const FaultWatch watch(ours.base, kPages * kPage);
                 raise(SIGBUS);
             }),
             SIGBUS);
}

}  // namespace

int main() {
    // First, for what their children are asked must not be what the others have set.
    test_what_is_not_watched_is_anothers();
    test_one_who_comes_later_is_asked_second();
    test_the_end_is_the_end();
    test_zeros_and_a_note();
    test_many_threads();
    test_watches_come_and_go();
    return checks_failed();
}
