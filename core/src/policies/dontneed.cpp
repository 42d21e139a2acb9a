// dontneed:N: what a route has used goes back to the system at once, except the N experts of each bank that have been
// used most of late; so an idle process holds little more than its dense bytes. While pages are held, the expert with
// the smallest decayed frequency leaves first.
//
// The hot experts of a bank lie in a heap, coldest on top. A use only warms, so only the expert just used can enter it,
// and one comparison a use keeps it right.
#include "candidates.h"
#include "decayed_use.h"
#include "indexed_heap.h"

namespace moestream {
namespace {

constexpr double kHalfLife = 64.0;  // tokens: the hot set of a paragraph, not of a sentence
constexpr uint32_t kDefaultHot = 0;

class DontNeed final : public CandidatePolicy {
  public:
    DontNeed(const PolicyShape& shape, uint32_t hot)
        : CandidatePolicy(shape.experts),
          bank_of_(shape.bank_of),
          number_(shape.experts),
          members_(shape.banks),
          room_(shape.banks, hot),
          heat_(shape.experts, kHalfLife),
          heap_(shape.experts, Colder{&heat_}) {
        for (uint32_t expert = 0; expert < shape.experts; ++expert) {
            std::vector<uint32_t>& bank = members_[bank_of_[expert]];
            number_[expert] = static_cast<uint32_t>(bank.size());
            bank.push_back(expert);
        }
        hot_.reserve(shape.banks);
        for (const std::vector<uint32_t>& bank : members_)
            hot_.emplace_back(static_cast<uint32_t>(bank.size()), ColderInBank{&heat_, &bank});
    }
    DontNeed(const DontNeed&) = delete;  // the heaps point at heat_
    DontNeed& operator=(const DontNeed&) = delete;

    void use(uint32_t expert, const Use& use) override {
        heat_.use(expert, use);
        if (candidate(expert)) heap_.update(expert);
        warm(bank_of_[expert], number_[expert]);
    }
    uint32_t victim(uint32_t) override { return heap_.top(); }
    bool keep(uint32_t expert) const override { return hot_[bank_of_[expert]].contains(number_[expert]); }

  private:
    struct ColderInBank {
        const DecayedUse* heat;
        const std::vector<uint32_t>* experts;
        bool operator()(uint32_t a, uint32_t b) const { return heat->colder((*experts)[a], (*experts)[b]); }
    };
    void warm(uint32_t bank, uint32_t number) {
        IndexedHeap<ColderInBank>& hot = hot_[bank];
        if (hot.contains(number)) return hot.update(number);
        if (room_[bank] > 0) {
            --room_[bank];
        } else {
            const uint32_t coldest = hot.top();
            if (coldest == kNone || !ColderInBank{&heat_, &members_[bank]}(coldest, number)) return;
            hot.remove(coldest);
        }
        hot.push(number);
    }
    void enter(uint32_t expert) override { heap_.push(expert); }
    void leave(uint32_t expert) override { heap_.remove(expert); }

    std::vector<uint32_t> bank_of_;
    std::vector<uint32_t> number_;                // per expert: its place in members_[bank]
    std::vector<std::vector<uint32_t>> members_;  // per bank
    std::vector<uint32_t> room_;                  // per bank: how many more may be hot
    DecayedUse heat_;
    IndexedHeap<Colder> heap_;
    std::vector<IndexedHeap<ColderInBank>> hot_;  // per bank, by place
};

const PolicyRegistration registration(
    "dontneed",
    "drops a routed expert after its use, except the hottest of its bank; argument: how many stay (default 0)",
    [](const PolicyShape& shape, const std::string& argument) -> std::unique_ptr<Policy> {
        const uint32_t hot = parse_number<uint32_t>(argument, kDefaultHot, 0, 1u << 20,
                                                    "dontneed's argument is how many experts of a bank stay, from 0");
        return std::make_unique<DontNeed>(shape, hot);
    });

}  // namespace
}  // namespace moestream
