// Descriptors are read and written attribute by attribute: a number, an address and a size. One table for each kind of
// descriptor says where its attributes lie.
#pragma once
#include <cstddef>
#include <span>

#include "abi.h"

namespace lt {

struct Attribute {
    unsigned id;
    std::size_t offset, bytes;
    bool read_only = false;
};

// An attribute that is a field of `Object`.
#define LT_ATTRIBUTE(id, Object, field) {id, offsetof(Object, field), sizeof(Object::field)}

// Writes an attribute of `object`. INVALID_VALUE for an unknown one, a null value or another size than the field's.
cublasStatus_t set_attribute(std::span<const Attribute> known, void* object, unsigned id, const void* value,
                             std::size_t bytes);

// Reads one. With `bytes` = 0 it only says the size.
cublasStatus_t get_attribute(std::span<const Attribute> known, const void* object, unsigned id, void* value,
                             std::size_t bytes, std::size_t* written);

// Hands out `bytes_wanted` bytes by the same rules.
cublasStatus_t give(const void* source, std::size_t bytes_wanted, void* value, std::size_t bytes,
                    std::size_t* written);

} // namespace lt
