//! The kernels as a table: for a terminal, or for docs/kernels.md.

use super::gate::Kernel;

/// One line for each kernel and architecture, in columns.
pub(super) fn text(kernels: &[Kernel]) -> String {
    let head = ["kernel", "arch", "threads", "registers", "shared", "dynamic", "blocks", "warps", "limit"];
    let mut rows = vec![head.map(str::to_owned)];
    rows.extend(kernels.iter().map(|kernel| {
        let (block, occupancy) = (&kernel.block, &kernel.occupancy);
        [
            kernel.name.clone(),
            kernel.arch.to_string(),
            block.threads.to_string(),
            block.registers.to_string(),
            block.static_shared_bytes.to_string(),
            block.dynamic_shared_bytes.to_string(),
            occupancy.blocks.to_string(),
            format!("{}/{}", occupancy.warps, occupancy.warps_max),
            occupancy.limit.to_string(),
        ]
    }));
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut out = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            // Names to the left, numbers to the right.
            if matches!(column, 0 | 1 | 8) { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        out.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        out.push('\n');
    }
    out
}

/// One line for each kernel; registers, blocks and warps for each architecture.
pub(super) fn markdown(kernels: &[Kernel]) -> String {
    let mut archs: Vec<_> = kernels.iter().map(|kernel| kernel.arch).collect();
    archs.sort();
    archs.dedup();
    let mut names: Vec<&str> = Vec::new();
    for kernel in kernels {
        if !names.contains(&kernel.name.as_str()) {
            names.push(&kernel.name);
        }
    }
    let columns = archs.iter().map(|arch| format!(" {arch} |")).collect::<String>();
    let mut out = format!(
        "| kernel | threads | shared bytes |{columns}\n|---|--:|--:|{}\n",
        "---|".repeat(archs.len())
    );
    for name in names {
        let of_name = || kernels.iter().filter(|kernel| kernel.name == name);
        let Some(first) = of_name().next() else { continue };
        let block = &first.block;
        let shared = match (block.static_shared_bytes, block.dynamic_shared_bytes) {
            (fixed, 0) => fixed.to_string(),
            (0, dynamic) => format!("{dynamic} dynamic"),
            (fixed, dynamic) => format!("{fixed} + {dynamic} dynamic"),
        };
        out.push_str(&format!("| `{name}` | {} | {shared} |", block.threads));
        for arch in &archs {
            let cell = of_name().find(|kernel| kernel.arch == *arch).map_or_else(String::new, |kernel| {
                let occupancy = &kernel.occupancy;
                format!(
                    " {} registers, {} blocks, {}/{} warps |",
                    kernel.block.registers, occupancy.blocks, occupancy.warps, occupancy.warps_max
                )
            });
            out.push_str(if cell.is_empty() { " |" } else { &cell });
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cubins::occupancy::{self, Block};

    fn kernels() -> Vec<Kernel> {
        let one = |name: &str, arch: &str, threads, registers, dynamic| {
            let arch = arch.parse().unwrap();
            let block = Block { threads, registers, static_shared_bytes: 0, dynamic_shared_bytes: dynamic };
            let occupancy = occupancy::of(&block, occupancy::limits(arch).unwrap()).unwrap();
            Kernel { source: "op/kernel.cu", arch, name: name.to_owned(), block, occupancy }
        };
        vec![
            one("gemm", "sm_90a", 128, 96, 49_152),
            one("gemv_bf16", "sm_80", 256, 40, 0),
            one("gemv_bf16", "sm_90a", 256, 32, 0),
        ]
    }

    #[test]
    fn the_terminal_s_table_has_a_line_for_each_kernel_and_architecture() {
        let expected = "\
kernel     arch    threads  registers  shared  dynamic  blocks  warps  limit
gemm       sm_90a      128         96       0    49152       4  16/64  shared memory
gemv_bf16  sm_80       256         40       0        0       6  48/64  registers
gemv_bf16  sm_90a      256         32       0        0       8  64/64  warps
";
        assert_eq!(text(&kernels()), expected);
    }

    #[test]
    fn the_documentation_s_table_has_a_line_for_each_kernel() {
        let expected = "\
| kernel | threads | shared bytes | sm_80 | sm_90a |
|---|--:|--:|---|---|
| `gemm` | 128 | 49152 dynamic | | 96 registers, 4 blocks, 16/64 warps |
| `gemv_bf16` | 256 | 0 | 40 registers, 6 blocks, 48/64 warps | 32 registers, 8 blocks, 64/64 warps |
";
        assert_eq!(markdown(&kernels()), expected);
    }
}
