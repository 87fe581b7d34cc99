//! `strftime` for templates that write today's date. Times are UTC: a server's answers should not depend on
//! where it stands.

const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAY_SECONDS: u64 = 24 * 60 * 60;
/// The year 9999: as far as Python's calendar goes.
const UNIX_SECONDS_MAX: u64 = 253_402_300_799;

struct Date {
    year: u64,
    /// 1 to 12.
    month: u64,
    /// 1 to 31.
    day: u64,
    /// 1 to 366.
    day_of_year: u64,
}

/// Formats a time in UTC, given in seconds since 1970. The error names the part of the format that is not
/// known.
pub(super) fn format(format: &str, unix_seconds: u64) -> Result<String, String> {
    let seconds = unix_seconds.min(UNIX_SECONDS_MAX);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = chars.next().ok_or("the format ends in %")?;
        match directive {
            '-' => {
                let directive = chars.next().ok_or("the format ends in %-")?;
                let padded =
                    field(directive, seconds).ok_or_else(|| format!("%-{directive} is not supported"))?;
                let bare = padded.trim_start_matches(['0', ' ']);
                out.push_str(if bare.is_empty() { "0" } else { bare });
            }
            _ => out.push_str(
                &field(directive, seconds).ok_or_else(|| format!("%{directive} is not supported"))?,
            ),
        }
    }
    Ok(out)
}

fn field(directive: char, seconds: u64) -> Option<String> {
    let days = seconds / DAY_SECONDS;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let hour_of_12 = (hour + 11) % 12 + 1;
    let date = date(days);
    let weekday = WEEKDAYS[(days % 7) as usize];
    let month = MONTHS[(date.month - 1) as usize];
    Some(match directive {
        'a' => weekday[..3].to_owned(),
        'A' => weekday.to_owned(),
        'b' | 'h' => month[..3].to_owned(),
        'B' => month.to_owned(),
        'd' => format!("{:02}", date.day),
        'e' => format!("{:2}", date.day),
        'm' => format!("{:02}", date.month),
        'y' => format!("{:02}", date.year % 100),
        'Y' => date.year.to_string(),
        'j' => format!("{:03}", date.day_of_year),
        'H' => format!("{hour:02}"),
        'I' => format!("{hour_of_12:02}"),
        'M' => format!("{minute:02}"),
        'S' => format!("{second:02}"),
        'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
        'F' => format!("{}-{:02}-{:02}", date.year, date.month, date.day),
        'T' => format!("{hour:02}:{minute:02}:{second:02}"),
        'D' => format!("{:02}/{:02}/{:02}", date.month, date.day, date.year % 100),
        'Z' => "UTC".to_owned(),
        'z' => "+0000".to_owned(),
        's' => seconds.to_string(),
        '%' => "%".to_owned(),
        'n' => "\n".to_owned(),
        't' => "\t".to_owned(),
        _ => return None,
    })
}

fn date(days_since_1970: u64) -> Date {
    let mut year = 1970;
    let mut rest = days_since_1970;
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    loop {
        let length = 365 + u64::from(is_leap(year));
        if rest < length {
            break;
        }
        rest -= length;
        year += 1;
    }
    let day_of_year = rest + 1;
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if rest < length {
            break;
        }
        rest -= length;
        month += 1;
    }
    Date { year, month, day: rest + 1, day_of_year }
}
