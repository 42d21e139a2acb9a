// A registry of one family's members. A new member is one file with one `static Registration` line.
//
// A member is named by text: `name` or `name:ARG` (`uring:24`, `lfu-decay:16`). `Registry<F>::parse` splits the
// text, finds the factory and passes it the argument text (empty when there is none). Unknown names and bad
// arguments throw Error(ErrorKind::usage) with the known names.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "moestream/error.h"

namespace moestream {

template <class Factory>
class Registry {
  public:
    struct Member {
        Factory factory;
        std::string help;  // one line: what it does, its argument and the argument's default
    };
    static Registry& instance() {
        static Registry registry;
        return registry;
    }
    void add(std::string name, std::string help, Factory factory) {
        members_.emplace(std::move(name), Member{std::move(factory), std::move(help)});
    }
    const Factory& find(std::string_view text, std::string& argument) const {
        const auto colon = text.find(':');
        const std::string name(text.substr(0, colon));
        argument = colon == std::string_view::npos ? std::string() : std::string(text.substr(colon + 1));
        const auto it = members_.find(name);
        if (it == members_.end()) {
            std::string known;
            for (const auto& [key, member] : members_) known += (known.empty() ? "" : ", ") + key;
            throw Error(ErrorKind::usage, "unknown member '" + name + "' (known: " + known + ")");
        }
        return it->second.factory;
    }
    const std::map<std::string, Member>& members() const { return members_; }

  private:
    std::map<std::string, Member> members_;
};

// For a member that takes none. Throws Error(usage) that names it.
inline void expect_no_argument(const char* name, const std::string& argument) {
    if (argument.empty()) return;
    throw Error(ErrorKind::usage, std::string(name) + " takes no argument, got '" + argument + "'");
}

template <class Factory>
struct Registration {
    Registration(const char* name, const char* help, Factory factory) {
        Registry<Factory>::instance().add(name, help, std::move(factory));
    }
};

}  // namespace moestream
