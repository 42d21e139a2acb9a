// The engine: one model's store, its predictor and the hook that llama.cpp calls while it computes.
//
// The hook's contract with llama.cpp's scheduler. `ask=true` comes for each node before the segment that ends at it
// is computed; returning true cuts the graph there. We cut at a layer's expert choice (to read the ids and start its
// reads) and at each expert matmul whose successor still waits for bytes, and nowhere else: a layer that finds all
// its experts in memory costs one cut. After a node the hook always returns true (false ends a split as if all of it
// had been computed); to stop, the abort callback does, which is asked once one more node has been computed.
//
// Threads: load and decode on one thread at a time; cancel() from any.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moestream/interpose.h"
#include "moestream/llama_abi.h"
#include "moestream/predictor.h"
#include "moestream/store.h"

namespace moestream {

struct EngineOptions {
    std::string libllama;  // path of the libllama this process has loaded
    std::string store;
    StoreOptions store_options;
    std::string predictor = "none";
    bool interpose = true;               // false: as if libllama had no import slots (for tests of that path)
    std::vector<bool> optional_banks;    // banks that no main graph computes (next-token-prediction layers)
};

class Engine {
  public:
    Engine(SlabIndex index, EngineOptions options);  // throws Error
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Around llama.cpp's load, on the loading thread. end_load throws what went wrong inside, or Error(internal)
    // when llama.cpp did not map a shard at all.
    void begin_load();
    void end_load(bool loaded);
    // The budget of experts, once what the process uses is known: `capacities` for each part, and for a store that
    // grows past them the most bytes it may grow to (0: no limit).
    void set_budget(const std::vector<uint32_t>& capacities, uint64_t growth_limit);
    std::vector<uint32_t> resize(const std::vector<uint32_t>& capacities);  // see Store::resize

    // Around one llama_decode. end_step checks that every bank was routed exactly once in each pass.
    void begin_step();
    void end_step();
    void cancel(bool on) { cancelled_ = on; }

    // From now on everything a trace needs is recorded; take_trace empties the record (`finish`: also of slabs that
    // are still on their way). Between steps only.
    void start_trace();
    Recorder::Taken take_trace(bool finish);

    // Lets go of the store: its memory, descriptors and threads. llama.cpp's model must be gone. Idempotent; any other
    // call then throws Error(usage).
    void close();

    static bool on_node(abi::Tensor* node, bool ask, void* engine);
    static bool on_abort(void* engine);

    const SlabIndex& index() const { return index_; }
    const Store& store() const;
    const std::optional<Failure>& failure() const;
    void clear_failure();
    uint64_t routes() const { return routes_; }
    uint64_t tokens() const { return token_; }

  private:
    bool ask(const abi::Tensor& node);
    void computed(const abi::Tensor& node);
    bool chooses_chunks(uint32_t bank) const;
    bool ask_matmul(const abi::Tensor& node);
    bool route_all(uint32_t bank);
    void begin_pass(uint32_t bank, uint32_t tokens);
    void check_pass();
    void pump();
    void fail(std::string what);
    void refuse_id(const abi::Tensor& ids, int32_t id, uint32_t experts);
    void record_route(const abi::Tensor& ids, uint32_t bank);

    SlabIndex index_;
    EngineOptions options_;
    abi::Ops ops_;
    std::unique_ptr<Store> store_;
    std::unique_ptr<Predictor> predictor_;
    std::unique_ptr<Recorder> recorder_;  // null: no trace
    std::unique_ptr<LoadScope> scope_;
    std::vector<char*> mapped_before_;     // the shards' mappings that are not of this load
    std::vector<uint32_t> bank_of_layer_;  // by layer, kNone
    std::vector<uint32_t> chunks_of_;      // by bank, its layer's bank of chunk experts, kNone
    std::optional<Failure> failure_;
    std::exception_ptr load_error_;
    std::atomic<bool> cancelled_{false};

    // The current route. ids_ is the node whose values were read: a matmul that names another is not covered by it.
    const abi::Tensor* ids_ = nullptr;
    const abi::Tensor* logits_ = nullptr;
    uint32_t bank_ = kNone;
    bool whole_ = false;                   // all experts of bank_ are routed: any choice of them is covered
    bool unseen_ = false;                  // no node said what bank_ is routed to: it was read whole at its matmul
    uint32_t uncomputed_ = kNone;          // the bank of matmuls asked about since the last cut
    std::vector<uint32_t> count_;          // by id, of the bank being routed
    std::vector<RoutedExpert> routed_;
    std::vector<uint32_t> wish_;           // experts to read early, once no demand is in flight
    bool wished_ = false;

    uint64_t token_ = 0;        // tokens before this pass
    uint32_t pass_tokens_ = 0;
    uint32_t last_bank_ = kNone;
    uint64_t routes_ = 0;
    std::vector<uint8_t> seen_;  // by bank, in this pass
};

}  // namespace moestream
