// What a trace is made of, as the engine sees it happen: routes with the ids in the router's own order, what was asked
// for early, and every slab that was read. Filled by the thread that decodes, emptied between steps.
//
// A recorder allocates only while a step is larger than all before it. Times are CLOCK_MONOTONIC nanoseconds, 0 for
// what did not happen.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "moestream/slab_index.h"

namespace moestream {

enum class SlabKind : uint8_t {
    demand,       // read because a route had chosen it
    speculative,  // read early
    advised,      // the kernel was asked for it: nobody learns when it was there
    dropped,      // asked for early and taken back before the read began: no bytes
};

struct SlabEvent {
    uint64_t route = 0;  // routes recorded before it was issued: the last of them caused it
    uint32_t expert = 0;
    uint8_t slot = 0;  // the tensor's place in its bank
    SlabKind kind = SlabKind::demand;
    uint64_t bytes = 0;
    uint64_t issued_ns = 0;
    uint64_t ready_ns = 0;
    uint64_t needed_ns = 0;  // a matmul asked for it, the first time
    uint64_t waited_ns = 0;  // and slept this long for it
};

class Recorder {
  public:
    struct Routes {  // one entry a route, in the order they happened
        std::vector<uint32_t> bank;
        std::vector<uint64_t> token;  // tokens before the pass
        std::vector<uint32_t> tokens;
        // Rows of ids: the pass's tokens; fewer in the last layer, which computes only rows whose logits are wanted; 1
        // where the choice was not seen and the whole bank was read.
        std::vector<uint32_t> rows;
        std::vector<uint32_t> k;     // ids a row
        std::vector<uint32_t> wishes;
        std::vector<int32_t> ids;        // rows * k a route, numbers inside the bank
        std::vector<uint32_t> wish_ids;  // global experts
    };
    struct Taken {
        Routes routes;
        std::vector<SlabEvent> slabs;
    };

    Recorder(uint32_t experts, uint32_t slots) : slots_(slots), open_(size_t{experts} * slots) {}

    void route(uint32_t bank, uint64_t token, uint32_t tokens, uint32_t rows, uint32_t k);
    void id(int32_t id) { routes_.ids.push_back(id); }
    void wish(std::span<const uint32_t> experts);  // after the last route

    // One slab's read, from issue until a matmul needed it, it was issued again, or finish().
    void issued(uint32_t expert, uint32_t slot, SlabKind kind, uint64_t bytes, uint64_t now);
    void ready(uint32_t expert, uint32_t slot, uint64_t at);
    void dropped(uint32_t expert, uint32_t slot);
    void needed(uint32_t expert, uint32_t slot, uint64_t at, uint64_t waited_ns);

    // Everything since the last call; with `finish` also the slabs that nothing has needed yet.
    Taken take(bool finish);

  private:
    SlabEvent& open(uint32_t expert, uint32_t slot) { return open_[size_t{expert} * slots_ + slot]; }
    void close(SlabEvent& event);

    uint32_t slots_;
    uint64_t count_ = 0;  // routes recorded, in all
    Routes routes_;
    std::vector<SlabEvent> done_;
    std::vector<SlabEvent> open_;  // by expert and slot; issued_ns 0: none
};

}  // namespace moestream
