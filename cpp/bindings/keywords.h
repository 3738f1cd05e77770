// How functions are defined that are called often, and with keywords.
#pragma once

#include <tuple>
#include <vector>

#include "bindings.h"

namespace kvzc::bindings {

// Gives an object to be put in place of `function`: called with keywords it finds them by the addresses of
// their names, and then calls `positional`, which is the same but takes everything by position. pybind11
// compares as text, and makes a string for each comparison: for the nine arguments of a put as much work
// as all the rest of it. In every other way it is as `function`, which also gets what is not found so.
// names: those that may be given by keyword. They come after `required` others that are given by position,
//     and are None when they are not given.
py::object with_quick_keywords(const py::object& function, const py::object& positional,
                               const std::vector<const char*>& names, std::size_t required);

// Defines a method of a class, or a function of a module, whose `keywords` all default to None.
template <typename Scope, typename Function, typename... Required, typename... Keywords>
void define_quick(Scope& scope, const char* name, const Function& function, const char* doc,
                  const std::tuple<Required...>& required, const std::tuple<Keywords...>& keywords) {
  constexpr bool is_method = !std::is_same_v<Scope, py::module_>;
  const auto where = [&] {
    if constexpr (is_method) return py::is_method(scope);
    else return py::scope(scope);
  }();
  const auto make = [&](const auto&... extra) {
    return py::cpp_function(function, py::name(name), where, extra..., doc);
  };
  const py::object as_seen = std::apply(
      make, std::tuple_cat(required, std::make_tuple(py::kw_only()), keywords));
  const py::object positional = std::apply(make, std::tuple_cat(required, keywords));
  const std::vector<const char*> names = std::apply(
      [](const auto&... each) { return std::vector<const char*>{each.name...}; }, keywords);
  scope.attr(name) =
      with_quick_keywords(as_seen, positional, names, sizeof...(Required) + (is_method ? 1 : 0));
}

}  // namespace kvzc::bindings
