// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package ages keeps since when ports are open, for the agent that starts next.
package ages

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/trust"
)

// fileVersion is the version of the file's format. Another one is not read.
const fileVersion = 1

// maxFile bounds the file, in bytes: some 100,000 ports.
const maxFile = 16 << 20

// Between two writes there is at least savePause, and writing takes at most one part in
// saveShare of the time, unless that makes the pause longer than savePauseMost: the agent
// may have been stopped while it wrote. Changes are looked at once in lookPause: what opens
// within it before a suspension can be younger for the next agent, by that suspension.
const (
	lookPause     = 10 * time.Second
	savePause     = time.Minute
	savePauseMost = time.Hour
	saveShare     = 5000
)

// File is the path of the file. It should be in the runtime directory: the next boot does
// not use it.
type File string

// Beside returns the file of the agent with that control socket. No other agent has it,
// because no two agents have one control socket.
func Beside(control string) File {
	return File(filepath.Join(filepath.Dir(control), "open-since-"+filepath.Base(control)+".json"))
}

// content is what the file has. All times are of CLOCK_BOOTTIME, in nanoseconds, so that
// neither a change of the wall clock nor a suspension matters.
type content struct {
	header
	Ports []kept `json:"ports"`
}

type header struct {
	Version int    `json:"version"`
	Boot    string `json:"boot"`
	// Complete is true if it was written when the agent ended in order: it has all that
	// this agent knew.
	Complete bool `json:"complete"`
}

// kept is one port.
type kept struct {
	Protocol port.Protocol `json:"protocol"`
	Address  netip.Addr    `json:"address"`
	Port     uint16        `json:"port"`
	Since    int64         `json:"since"`
	AtLeast  bool          `json:"atLeast,omitempty"`
	Origins  []origin      `json:"origins"`
}

// origin is one origin of a port.
type origin struct {
	Source string `json:"source"`
	ID     string `json:"id"`
	Handle uint64 `json:"handle,omitempty"`
	Since  int64  `json:"since"`
}

// clock reads the time.
type clock struct {
	now  func() time.Time
	boot func() (time.Duration, error) // CLOCK_BOOTTIME
	id   func() string                 // of the boot, "" if it is not known
}

func systemClock() clock { return clock{time.Now, bootTime, bootID} }

func bootTime() (time.Duration, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0, fmt.Errorf("CLOCK_BOOTTIME: %w", err)
	}
	return time.Duration(ts.Nano()), nil
}

func bootID() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b))
}

// errOtherBoot is the error about a file of another boot.
var errOtherBoot = errors.New("it is of another boot")

// Load returns the ports that an earlier agent knew, for registry.Registry.Recall. It
// returns none with an error if the file cannot be used: it is damaged, of another boot, too
// large, or another user can change it. No file is no error.
func (f File) Load() ([]port.Publication, error) { return f.load(systemClock()) }

func (f File) load(c clock) ([]port.Publication, error) {
	b, err := trust.ReadFile(string(f), maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var ports []port.Publication
	if err == nil {
		ports, err = decode(b, c)
	}
	if err != nil {
		return nil, fmt.Errorf("read since when ports are open from %s: %w", f, err)
	}
	return ports, nil
}

func decode(b []byte, c clock) ([]port.Publication, error) {
	var in content
	if err := json.Unmarshal(b, &in); err != nil {
		return nil, err
	}
	if in.Boot == "" || in.Boot != c.id() {
		return nil, errOtherBoot
	}
	if in.Version != fileVersion {
		return nil, fmt.Errorf("version %d of the file: want %d", in.Version, fileVersion)
	}
	boot, err := c.boot()
	if err != nil {
		return nil, err
	}
	now := c.now()
	at := func(since int64) time.Time { return now.Add(time.Duration(since) - boot) }
	out := make([]port.Publication, 0, len(in.Ports))
	for _, k := range in.Ports {
		if !k.valid(int64(boot)) {
			return nil, fmt.Errorf("%s port %d has no address, no number, or a time that has not come", k.Protocol, k.Port)
		}
		p := port.Publication{
			Key: port.Key{Protocol: k.Protocol, Address: k.Address, Port: k.Port}, Since: at(k.Since),
			// An agent that was killed may not have noted that a port was closed and opened.
			SinceAtLeast: k.AtLeast || !in.Complete,
		}
		for _, o := range k.Origins {
			p.Origins = append(p.Origins, port.OriginInfo{Origin: port.Origin{Source: o.Source, ID: o.ID}, Handle: o.Handle, Since: at(o.Since)})
		}
		out = append(out, p)
	}
	return out, nil
}

func (k kept) valid(boot int64) bool {
	past := func(t int64) bool { return t >= 0 && t <= boot }
	return k.Address.IsValid() && k.Port != 0 && past(k.Since) && !slices.ContainsFunc(k.Origins, func(o origin) bool { return !past(o.Since) })
}

// Publications is the merged table.
type Publications = table.Table[port.Key, port.Publication]

// Keep writes the file at once, now and then after changes, and when ctx ends. Call it when
// the kernel's ports are known.
func (f File) Keep(ctx context.Context, pubs *Publications, log *slog.Logger) {
	newKeeper(f, systemClock(), log).run(ctx, pubs)
}

// keeper writes the file.
type keeper struct {
	file  File
	clock clock
	log   *slog.Logger
	times times

	dirty  bool
	failed bool
	next   time.Time // no write before
}

func newKeeper(f File, c clock, log *slog.Logger) *keeper {
	// An earlier agent's file is not complete any more.
	return &keeper{file: f, clock: c, log: log, dirty: true}
}

// times tells CLOCK_BOOTTIME at times of Go's clock, which does not count suspensions.
type times struct {
	origin  time.Time // of Go's clock
	looked  time.Time // last
	periods []period  // the earliest first, which has no beginning
}

// period is the time between two suspensions.
type period struct {
	from   time.Time
	offset time.Duration // what CLOCK_BOOTTIME is beyond the time since the origin
	used   bool          // by at, since prune was called
}

// jitter is how far two readings of both clocks may differ without a suspension between them:
// this process may have waited for a processor between the two clocks.
const jitter = 50 * time.Millisecond

// look takes in a reading of both clocks. A suspension was after the look before this one.
func (t *times) look(now time.Time, boot time.Duration) {
	if len(t.periods) == 0 {
		t.origin = now
		t.periods = append(t.periods, period{offset: boot})
	}
	offset := boot - now.Sub(t.origin)
	if diff := offset - t.periods[len(t.periods)-1].offset; diff.Abs() > jitter {
		t.periods = append(t.periods, period{from: t.looked, offset: offset})
	}
	t.looked = now
}

// at returns CLOCK_BOOTTIME at that time, which has a reading of the monotonic clock, 0 if it
// was before the boot. There must have been a look.
func (t *times) at(when time.Time) time.Duration {
	i := sort.Search(len(t.periods), func(i int) bool { return t.periods[i].from.After(when) })
	i = max(0, i-1)
	t.periods[i].used = true
	return max(0, t.periods[i].offset+when.Sub(t.origin))
}

// prune forgets the periods that at did not use since the last call, but not the last two: a
// port of them may not have been asked for yet.
func (t *times) prune() {
	n := max(0, len(t.periods)-2)
	used := slices.DeleteFunc(t.periods[:n:n], func(p period) bool { return !p.used })
	t.periods = append(used, t.periods[n:]...)
	for i := range t.periods {
		t.periods[i].used = false
	}
}

func (k *keeper) run(ctx context.Context, pubs *Publications) {
	sub := pubs.Watch()
	defer sub.Close()
	for ctx.Err() == nil {
		view, change := sub.Take()
		k.note(change.Generation > change.Base)
		if k.dirty && !k.clock.now().Before(k.next) {
			k.save(view, false)
		}
		looked := k.clock.now()
		var due time.Time
		if k.dirty {
			due = k.next
		}
		_ = schedule.Wait(ctx, due, sub.C())
		_ = schedule.Sleep(ctx, lookPause-k.clock.now().Sub(looked))
	}
	view, change := sub.Take()
	k.note(change.Generation > change.Base)
	k.save(view, true)
}

// note notes whether ports have changed, and soon whether the machine was suspended before.
func (k *keeper) note(changed bool) {
	boot, err := k.clock.boot()
	if err != nil {
		return
	}
	k.times.look(k.clock.now(), boot)
	k.dirty = k.dirty || changed
}

// save writes the file. complete says that this is the end.
func (k *keeper) save(view table.View[port.Key, port.Publication], complete bool) {
	began := k.clock.now()
	err := k.write(view, complete)
	k.dirty = false // what cannot be saved is tried again when ports change
	if err != nil && !k.failed {
		k.log.Warn("cannot save since when ports are open; their ages begin anew with the next agent", "err", err)
	}
	k.failed = err != nil
	ended := k.clock.now()
	k.next = ended.Add(min(max(savePause, schedule.Rest(ended.Sub(began), saveShare)), savePauseMost))
}

// write writes port by port, so that it takes no memory that grows with their number.
func (k *keeper) write(view table.View[port.Key, port.Publication], complete bool) error {
	head, err := json.Marshal(header{Version: fileVersion, Boot: k.clock.id(), Complete: complete})
	if err != nil {
		return err
	}
	return trust.StreamFile(string(k.file), func(w io.Writer) error {
		limited := &limitedWriter{w: w, left: maxFile}
		out := bufio.NewWriterSize(limited, 16<<10)
		// A bufio.Writer returns its first error again at the end.
		_, _ = out.Write(head[:len(head)-1])
		_, _ = out.WriteString(`,"ports":[`)
		if err := k.writePorts(out, view); err != nil {
			return err
		}
		_, _ = out.WriteString("]}\n")
		return out.Flush()
	})
}

func (k *keeper) writePorts(out *bufio.Writer, view table.View[port.Key, port.Publication]) error {
	if len(k.times.periods) == 0 {
		return nil // the time since the boot is not known
	}
	var (
		one kept
		to  = json.NewEncoder(out)
		n   int
	)
	for _, p := range view.All() {
		if n++; n > 1 {
			_ = out.WriteByte(',')
		}
		since := k.times.at(p.Since)
		one = kept{p.Protocol, p.Address, p.Port, int64(since), p.SinceAtLeast, one.Origins[:0]}
		for _, o := range p.Origins {
			one.Origins = append(one.Origins, origin{o.Source, o.ID, o.Handle, int64(max(since, k.times.at(o.Since)))})
		}
		if err := to.Encode(&one); err != nil {
			return fmt.Errorf("%d of %d ports: %w", n, view.Len(), err)
		}
	}
	k.times.prune()
	return nil
}

// limitedWriter writes no more than left bytes to w.
type limitedWriter struct {
	w    io.Writer
	left int
}

func (l *limitedWriter) Write(b []byte) (int, error) {
	if l.left -= len(b); l.left < 0 {
		return 0, fmt.Errorf("more than %d bytes", maxFile)
	}
	return l.w.Write(b)
}
