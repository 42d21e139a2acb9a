// A page of a mapped file that cannot be had (the file got shorter, the device failed) is a SIGBUS, which ends the
// process. While a range is watched, such a page becomes one of zeros and the watch remembers where: whoever touched it
// goes on, and what came of it is not to be used.
//
// The handler is installed with the first watch and stays. It may run on any thread, takes no lock and allocates
// nothing; faults elsewhere go to the handler that was there before (Python's faulthandler, say), or end the process as
// they would have.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>

namespace moestream {

class FaultWatch {
  public:
    // [base, base + bytes) until destroyed: after that nothing may touch it.
    FaultWatch(void* base, size_t bytes);
    ~FaultWatch();
    FaultWatch(const FaultWatch&) = delete;
    FaultWatch& operator=(const FaultWatch&) = delete;

    // Bytes from the base to the first touch of a page that could not be had. For ever: its zeros are still there.
    std::optional<size_t> failed_at() const;

    // Puts the handler in front again where somebody has set another since. Cheap; before each step.
    static void stay_in_front();

  private:
    struct Slot;
    friend struct FaultHandler;
    Slot* slot_;
};

}  // namespace moestream
