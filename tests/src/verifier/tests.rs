use super::*;

const LOG: &str = "verification time 1234 usec\n\
    stack depth 152+16+8\n\
    processed 5678 insns (limit 1000000) max_states_per_insn 4 total_states 200 \
    peak_states 150 mark_read 30\n";

#[test]
fn statistics_are_parsed_from_the_log_of_a_successful_load() {
    let figures = VerifierStats {
        instructions: 5678,
        stack: 168,
        microseconds: 1234,
    };
    assert_eq!(VerifierStats::parse(LOG), Some(figures));
    // Text around the statistics is ignored.
    let warned = format!("func#0 @0\n{LOG}and more\n");
    assert_eq!(VerifierStats::parse(&warned), Some(figures));
}

#[test]
fn the_maximum_stack_depth_of_new_kernels_is_preferred() {
    let log = LOG.replace(
        "stack depth 152+16+8\n",
        "stack depth max 176\nsubprog 0 (<unknown>) main insns_self 21 insns_total 21 stack 152\n",
    );

    assert_eq!(
        VerifierStats::parse(&log).map(|figures| figures.stack),
        Some(176)
    );
}

#[test]
fn a_log_without_all_statistics_is_refused() {
    for line in LOG.lines() {
        assert_eq!(VerifierStats::parse(&LOG.replace(line, "")), None, "{line}");
    }
    assert_eq!(VerifierStats::parse(&LOG.replace("152+", "152-")), None);
    assert_eq!(VerifierStats::parse(""), None);
}

#[test]
fn only_variants_that_the_kernel_can_load_are_measured() {
    let all = [
        ("rewrite", 0),
        ("rewrite-steering", 2),
        ("retval", 0),
        ("retval-steering", 2),
    ];
    for (set_retval, expected) in [(false, &all[..2]), (true, &all[..])] {
        let variants = variants(Features {
            set_retval,
            tcx: false,
            coarse_clock: false,
            kernel_offsets: None,
            kernel_socket_bit: None,
        });
        let names: Vec<_> = variants.iter().map(|it| it.name(false)).collect();
        let prefix_counts = variants.iter().map(|it| it.switches.prefixes.len());
        let prefix_counts: Vec<_> = names
            .iter()
            .map(String::as_str)
            .zip(prefix_counts)
            .collect();
        assert_eq!(prefix_counts, expected);
    }
}

#[test]
fn an_instruction_is_encoded_as_the_compiler_writes_it() {
    // `r1 = 0x12345678` and `*(u16 *)(r10 - 2) = r3`, as encoded by the compiler.
    let bytes = [
        [0xb7, 1, 0, 0, 0x78, 0x56, 0x34, 0x12],
        [0x6b, 0x3a, 0xfe, 0xff, 0, 0, 0, 0],
    ];
    let instructions = aya_obj::obj::copy_instructions(&bytes.concat()).unwrap();

    assert_eq!(encode(&instructions), bytes.map(u64::from_ne_bytes));
}
