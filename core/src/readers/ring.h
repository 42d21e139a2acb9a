// The kernel's side of io_uring: two rings in shared memory and three system calls, without a library.
//
// One thread at a time. Reads are pushed, told to the kernel by submit(), and come back through pop() with the number
// they were pushed with. Never more may be out than `depth`, so neither ring can overflow.
#pragma once
#include <linux/io_uring.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace moestream {

class Ring {
  public:
    explicit Ring(uint32_t depth);  // throws Error(unsupported) with the remedy when the kernel refuses any of it
    ~Ring() = default;
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    void push_read(int fd, uint64_t offset, void* to, uint32_t bytes, uint64_t number);
    void submit();       // throws Error(io)
    void submit_wait();  // and sleeps until at least one has come back
    bool pop(uint64_t& number, int32_t& result);
    // Not the process that made it: the rings are not mapped here, and what is in flight is the parent's.
    bool inherited() const;

  private:
    struct Descriptor {
        int fd = -1;
        ~Descriptor();
    };
    struct Shared {
        char* memory = nullptr;
        size_t bytes = 0;
        pid_t process = 0;
        ~Shared();
    };
    void map(Shared& shared, size_t bytes, off_t offset);
    void set_up(uint32_t depth);
    void prove();
    io_uring_sqe& push(uint64_t number);
    bool enter(uint32_t complete, uint32_t flags, int& error);
    uint32_t* word(uint32_t offset) const { return reinterpret_cast<uint32_t*>(rings_.memory + offset); }

    Descriptor ring_;
    Shared rings_;
    Shared entries_;
    uint32_t* sq_tail_ = nullptr;
    uint32_t* sq_array_ = nullptr;
    uint32_t* cq_head_ = nullptr;
    uint32_t* cq_tail_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
    uint32_t sq_mask_ = 0;
    uint32_t cq_mask_ = 0;
    uint32_t unsubmitted_ = 0;
};

}  // namespace moestream
