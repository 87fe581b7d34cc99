// Cubins: ELF files, of which names of kernels, sizes of parameters, registers and static shared memory are read.
#include <cstring>
#include <elf.h>

#include "modules.h"

namespace software {

namespace {

constexpr int MACHINE_CUDA = 190;
// Since version 8 of their interface, the architecture stands in another byte of the flags, as does the mark of what
// runs on this architecture alone.
constexpr unsigned char NEWER_ABI = 8;

// Attributes of `.nv.info`: a byte of format, a byte of kind, two bytes of value or of size.
enum Format : unsigned char { SIZED = 4 };
enum Kind : unsigned char { PARAMETER = 0x17, REGISTERS = 0x2f };

class Reader {
public:
    explicit Reader(const unsigned char* image) : image(image) { std::memcpy(&header, image, sizeof header); }

    std::optional<Cubin> read() {
        if (header.e_machine != MACHINE_CUDA || header.e_shentsize != sizeof(Elf64_Shdr)) return std::nullopt;
        for (unsigned at = 0; at < header.e_shnum; at++) {
            Elf64_Shdr section;
            std::memcpy(&section, image + header.e_shoff + at * sizeof section, sizeof section);
            sections.push_back(section);
        }
        if (header.e_shstrndx >= sections.size()) return std::nullopt;
        read_architecture();
        for (const Elf64_Shdr& section : sections)
            if (section.sh_type == SHT_SYMTAB) read_symbols(section);
        for (const Elf64_Shdr& section : sections) read_section(section);
        return std::move(cubin);
    }

private:
    const char* text(const Elf64_Shdr& table, std::size_t offset) const {
        return offset < table.sh_size ? reinterpret_cast<const char*>(image + table.sh_offset + offset) : "";
    }

    void read_architecture() {
        bool newer = header.e_ident[EI_ABIVERSION] >= NEWER_ABI;
        cubin.architecture = static_cast<int>(newer ? header.e_flags >> 8 & 0xff : header.e_flags & 0xff);
        // The mark of an `a` was not found to be reliable over versions: the driver's own check of the family stays.
        cubin.exact = false;
    }

    void read_symbols(const Elf64_Shdr& table) {
        constexpr unsigned char ENTRY = 0x10;
        if (table.sh_link >= sections.size()) return;
        for (std::size_t at = 0; at < table.sh_size / sizeof(Elf64_Sym); at++) {
            Elf64_Sym symbol;
            std::memcpy(&symbol, image + table.sh_offset + at * sizeof symbol, sizeof symbol);
            bool kernel = ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && ELF64_ST_BIND(symbol.st_info) == STB_GLOBAL &&
                          symbol.st_other & ENTRY;
            if (!kernel) continue;
            std::string name = text(sections[table.sh_link], symbol.st_name);
            by_symbol[static_cast<std::uint32_t>(at)] = name;
            cubin.kernels[name];
        }
    }

    Compiled* kernel_of(const std::string& name, const std::string& prefix) {
        if (name.compare(0, prefix.size(), prefix) != 0) return nullptr;
        auto found = cubin.kernels.find(name.substr(prefix.size()));
        return found == cubin.kernels.end() ? nullptr : &found->second;
    }

    void read_section(const Elf64_Shdr& section) {
        std::string name = text(sections[header.e_shstrndx], section.sh_name);
        if (Compiled* kernel = kernel_of(name, ".nv.shared.")) kernel->shared_bytes = static_cast<int>(section.sh_size);
        Compiled* kernel = kernel_of(name, ".nv.info.");
        if (kernel || name == ".nv.info") read_info(section, kernel);
    }

    void read_info(const Elf64_Shdr& section, Compiled* kernel) {
        const unsigned char *at = image + section.sh_offset, *end = at + section.sh_size;
        while (end - at >= 4) {
            unsigned char format = at[0], kind = at[1];
            std::size_t bytes = at[2] | at[3] << 8;
            at += 4;
            if (format != SIZED) continue;
            if (static_cast<std::size_t>(end - at) < bytes) return;
            std::uint32_t words[3] = {};
            std::memcpy(words, at, std::min(bytes, sizeof words));
            if (kernel && kind == PARAMETER) note_parameter(*kernel, words);
            if (!kernel && kind == REGISTERS && by_symbol.count(words[0]))
                cubin.kernels[by_symbol[words[0]]].registers = static_cast<int>(words[1]);
            at += bytes;
        }
    }

    static void note_parameter(Compiled& kernel, const std::uint32_t (&words)[3]) {
        constexpr std::uint32_t PARAMETERS_MAX = 1024;
        std::uint32_t ordinal = words[1] & 0xffff, bytes = words[2] >> 18;
        if (ordinal >= PARAMETERS_MAX) return;
        if (kernel.parameter_bytes.size() <= ordinal) kernel.parameter_bytes.resize(ordinal + 1);
        kernel.parameter_bytes[ordinal] = bytes;
    }

    const unsigned char* image;
    Elf64_Ehdr header;
    std::vector<Elf64_Shdr> sections;
    std::map<std::uint32_t, std::string> by_symbol;
    Cubin cubin;
};

} // namespace

std::optional<Cubin> read_cubin(const unsigned char* image) { return Reader(image).read(); }

} // namespace software
