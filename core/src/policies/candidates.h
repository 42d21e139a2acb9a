// What every policy shares: an expert is a *candidate* (it may be named as a victim) while it is resident and not
// pinned. A policy says what to do when one becomes a candidate and when it stops being one.
#pragma once
#include <string>
#include <vector>

#include "moestream/policy.h"

namespace moestream {

class CandidatePolicy : public Policy {
  public:
    explicit CandidatePolicy(uint32_t experts) : state_(experts, 0) {}
    void admit(uint32_t expert) override { change(expert, kResident, true); }
    void forget(uint32_t expert) override { change(expert, kResident, false); }
    void pin(uint32_t expert, bool pinned) override { change(expert, kPinned, pinned); }

  protected:
    virtual void enter(uint32_t expert) = 0;  // has become a candidate
    virtual void leave(uint32_t expert) = 0;  // is one no more
    bool candidate(uint32_t expert) const { return state_[expert] == kResident; }

  private:
    static constexpr uint8_t kResident = 1, kPinned = 2;
    void change(uint32_t expert, uint8_t bit, bool on) {
        const bool before = candidate(expert);
        state_[expert] = static_cast<uint8_t>(on ? state_[expert] | bit : state_[expert] & ~bit);
        if (candidate(expert) == before) return;
        before ? leave(expert) : enter(expert);
    }
    std::vector<uint8_t> state_;
};

}  // namespace moestream
