// Which expert leaves when another must come: a decision, no bytes.
//
// One policy object serves one *part* of the budget: experts of equal size, so capacity is a number of experts.
// Experts are numbered 0..experts-1 inside the part. The owner (ExpertCache) calls, for every expert of a route:
//   use(e, ...)     the expert was routed, resident or not (history may be kept for absent experts)
//   admit(e)        it became resident;  forget(e)  it left
//   pin(e, true)    it may not be chosen as victim until pin(e, false)
//   victim(in)      the resident, unpinned expert to give its place to `in`; kNone when there is none.
//                   A victim is only named; the owner calls forget() for it.
// All verbs are O(1) or O(log n), amortised, allocate nothing after construction, and are deterministic: ties go to
// the expert that was used least recently, then to the lower number. (lfu-adapt says what it spends once a route.) The plain-Python specification of every member
// is tests/reference/policies.py; the two must agree step by step.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "moestream/registry.h"
#include "moestream/slab_index.h"

namespace moestream {

// One use of an expert by one route of one step.
struct Use {
    uint64_t token = 0;   // tokens processed before this step: the policies' clock
    uint32_t tokens = 1;  // tokens in the step
    uint32_t count = 1;   // how many of them chose this expert
};

class Policy {
  public:
    virtual ~Policy() = default;
    virtual void use(uint32_t expert, const Use& use) = 0;
    virtual void admit(uint32_t expert) = 0;
    virtual void forget(uint32_t expert) = 0;
    virtual void pin(uint32_t expert, bool pinned) = 0;
    virtual uint32_t victim(uint32_t incoming) = 0;
    // May it stay once the matmuls that wanted it are over? False: the store gives its pages back at once.
    virtual bool keep(uint32_t) const { return true; }
    // Can it do with a smaller capacity than it was made for? No, where some experts never leave.
    virtual bool elastic() const { return true; }
};

struct PolicyShape {
    uint32_t experts = 0;
    uint32_t capacity = 0;               // experts that fit
    std::vector<uint32_t> bank_of;       // per expert: dense bank number inside the part, 0..banks-1
    uint32_t banks = 0;
    std::vector<double> priority;        // per expert, what a seed says it is worth; empty: no seed
};

using PolicyFactory = std::function<std::unique_ptr<Policy>(const PolicyShape&, const std::string& argument)>;
using PolicyRegistration = Registration<PolicyFactory>;
// "lru", "lfu-decay:16", "pinned:FILE" (the file is not opened here: see `priority`). Throws Error(usage).
std::unique_ptr<Policy> make_policy(std::string_view text, const PolicyShape& shape);

}  // namespace moestream
