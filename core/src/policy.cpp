#include "moestream/policy.h"

namespace moestream {

static void validate(const PolicyShape& shape) {
    const auto require = [](bool condition, const char* what) {
        if (!condition) throw Error(ErrorKind::usage, std::string("policy: ") + what);
    };
    require(shape.experts > 0, "a part has no experts");
    require(shape.capacity >= 1 && shape.capacity <= shape.experts, "capacity must be from 1 to the part's experts");
    require(shape.bank_of.size() == shape.experts, "bank_of must have one entry for each expert");
    for (const uint32_t bank : shape.bank_of) require(bank < shape.banks, "bank_of names a bank that does not exist");
}

std::unique_ptr<Policy> make_policy(std::string_view text, const PolicyShape& shape) {
    validate(shape);
    try {
        if (text.ends_with(':')) throw Error(ErrorKind::usage, "'" + std::string(text) + "' lacks its argument");
        std::string argument;
        const PolicyFactory& factory = Registry<PolicyFactory>::instance().find(text, argument);
        return factory(shape, argument);
    } catch (const Error& error) {
        throw Error(error.kind, std::string("policy: ") + error.what());
    }
}

}  // namespace moestream
