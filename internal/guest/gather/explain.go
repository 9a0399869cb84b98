// SPDX-License-Identifier: Apache-2.0

//go:build linux

package gather

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// Limits on the work that one question may cause.
const (
	dialTimeout = time.Second
	dialsMax    = 4 // targets of one publication
	lookTimeout = 3 * time.Second
	similarMax  = 3
)

// Explainer answers why a port is, or is not, reachable. It implements
// status.Explainer and is safe for concurrent use.
type Explainer struct {
	agent Agent
	dials *rate.Limiter
	look  sync.Mutex // held while sockets are dumped
}

// NewExplainer returns an explainer for the agent a.
func NewExplainer(a Agent) *Explainer {
	return &Explainer{agent: a, dials: rate.NewLimiter(rate.Every(250*time.Millisecond), 2*dialsMax)}
}

// Explain gathers the facts about a port and judges them.
func (e *Explainer) Explain(ctx context.Context, q explain.Query) (explain.Report, error) {
	f := explain.Facts{Query: q, Now: time.Now(), NetNS: netnsName(), RulesFile: e.agent.RulesFile, ForwardsFile: e.agent.Forwards.Path()}
	if e.agent.Refused != nil {
		f.Refused = e.agent.Refused()
	}
	for _, s := range e.agent.Registry.Sources().View().All() {
		f.Sources = append(f.Sources, explain.Source{Name: s.Name, State: string(s.State), Error: s.Error})
	}
	known := e.publications(ctx, q, &f)
	e.sockets(ctx, q, known, &f)
	f.Unread, _ = e.agent.Unread()
	f.Unread = explain.UnreadAbout(f.Unread, q.Port)
	if err := ctx.Err(); err != nil {
		return explain.Report{}, err
	}
	return explain.Evaluate(f), nil
}

func netnsName() string {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &st); err != nil {
		return ""
	}
	return fmt.Sprintf("net:[%d]", st.Ino)
}

// publications adds the publications of the port to f and returns the cookies of
// their sockets.
func (e *Explainer) publications(ctx context.Context, q explain.Query, f *explain.Facts) map[string]bool {
	known := map[string]bool{}
	outcomes := e.agent.Outcomes.View()
	rules := e.agent.Rules()
	for _, p := range e.agent.Registry.Publications().View().All() {
		for _, a := range p.Decision.Host {
			f.HostPorts = append(f.HostPorts, port.Slot{Protocol: p.Protocol, Port: a.Port()})
		}
		if p.Port != q.Port {
			if similar(p.Port, q.Port) && len(f.Similar) < similarMax && !slices.Contains(f.Similar, p.Slot()) {
				f.Similar = append(f.Similar, p.Slot())
			}
			continue
		}
		for _, o := range p.Origins {
			if o.Source == socketSource {
				known[o.ID] = true
			}
		}
		reported, _ := outcomes.Get(p.Key)
		pub := explain.Publication{Publication: p, Rules: rules.Explain(p), Outcomes: reported}
		if q.Dial && p.Protocol == port.TCP && p.Decision.Allow && (q.Protocol == 0 || q.Protocol == port.TCP) {
			pub.Dials = e.dial(ctx, p)
		}
		f.Publications = append(f.Publications, pub)
	}
	return known
}

// similar reports whether two numbers differ by one digit, or by the order of two.
func similar(a, b uint16) bool {
	x, y := strconv.Itoa(int(a)), strconv.Itoa(int(b))
	if len(x) != len(y) || len(x) < 3 {
		return false
	}
	var differ []int
	for i := range x {
		if x[i] != y[i] {
			differ = append(differ, i)
		}
	}
	return len(differ) == 1 || len(differ) == 2 && x[differ[0]] == y[differ[1]] && x[differ[1]] == y[differ[0]]
}

// dial tries the targets of a publication in order until one answers. Engines' relays
// accept for a container whether it listens or not, so that its own address is tried
// as well.
func (e *Explainer) dial(ctx context.Context, p port.Publication) (list []explain.Dial) {
	connect := e.agent.Dial
	if connect == nil {
		connect = forward.DialGuest
	}
	for i, target := range p.Dial {
		r := explain.Dial{Target: target}
		switch {
		case i == dialsMax:
			r.Answer, r.Detail = explain.NotTried, fmt.Sprintf("%d were tried", dialsMax)
			return append(list, r)
		case e.agent.Sockets.Serves(port.TCP, target):
			r.Answer = explain.Own
		case !e.dials.Allow():
			r.Answer, r.Detail = explain.NotTried, "asked too often"
		default:
			ctx, cancel := context.WithTimeout(ctx, dialTimeout)
			conn, err := connect(ctx, "tcp", target)
			cancel()
			if err == nil {
				forward.CloseOrderly(conn)
			}
			r.Answer, r.Detail = answer(err)
		}
		list = append(list, r)
		if r.Answer == explain.Answers && !(target.Addr().IsLoopback() && explain.ByContainer(p)) {
			break
		}
	}
	return list
}

func answer(err error) (explain.Answer, string) {
	var timeout net.Error
	switch {
	case err == nil:
		return explain.Answers, ""
	case errors.Is(err, syscall.ECONNREFUSED):
		return explain.Refuses, ""
	case errors.As(err, &timeout) && timeout.Timeout():
		return explain.Silent, ""
	}
	var sys *os.SyscallError
	if errors.As(err, &sys) {
		err = sys.Err
	}
	return explain.Errs, err.Error()
}

// sockets adds the sockets that the kernel has and the registry does not.
func (e *Explainer) sockets(ctx context.Context, q explain.Query, known map[string]bool, f *explain.Facts) {
	e.look.Lock()
	defer e.look.Unlock()
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	here, err := observer.Look(ctx, q.Port)
	if err != nil {
		f.Missing = append(f.Missing, "sockets: "+err.Error())
	}
	holders(here, f.Publications)
	for _, s := range here {
		if !known[strconv.FormatUint(s.Cookie, 16)] {
			f.Sockets = append(f.Sockets, e.describe(s))
		}
	}
	if slices.ContainsFunc(f.Publications, func(p explain.Publication) bool { return q.Protocol == 0 || q.Protocol == p.Protocol }) {
		return // published from here: other namespaces do not matter
	}
	elsewhere, err := observer.LookElsewhere(ctx, q.Port)
	if err != nil {
		f.Missing = append(f.Missing, "other network namespaces: "+err.Error())
	}
	for _, s := range elsewhere {
		f.Elsewhere = append(f.Elsewhere, e.describe(s))
	}
}

// holders notes of publications whose owner is a process that has none of their sockets who
// has one.
func holders(sockets []observer.Found, list []explain.Publication) {
	for i := range list {
		p := &list[i]
		if p.Owner.Kind != port.OwnerProcess || p.Owner.ID == "" {
			continue
		}
		for _, s := range sockets {
			id := strconv.FormatUint(s.Cookie, 16)
			switch {
			case !slices.ContainsFunc(p.Origins, func(o port.OriginInfo) bool {
				return o.Source == socketSource && strings.TrimSuffix(o.ID, "/4") == id
			}):
				continue
			case s.Sought:
				p.Holder = "no process"
			case s.PID != 0:
				p.Holder = process(s)
			}
			if s.Comm == p.Owner.Name && strconv.FormatUint(uint64(s.PID), 10) == p.Owner.ID {
				p.Holder = ""
				break
			}
		}
	}
}

func process(s observer.Found) string { return fmt.Sprintf("pid %d (%s)", s.PID, s.Comm) }

func (e *Explainer) describe(s observer.Found) explain.Socket {
	out := explain.Socket{
		Protocol: s.Protocol, Address: netip.AddrPortFrom(s.Address, s.Port), Kind: explain.Listening,
		Own: e.agent.Sockets.Has(s.Cookie), NetNS: s.Space,
	}
	switch {
	case s.Client:
		out.Kind = explain.Client
	case !s.Listening:
		out.Kind = explain.Bound
	}
	if s.PID != 0 {
		out.Process = process(s)
		out.Container = e.container(s.PID)
	}
	return out
}

// container returns the container whose cgroup the process is in: as the engines
// know it, or else only its id, taken from the name of the cgroup.
func (e *Explainer) container(pid uint32) port.Owner {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return port.Owner{}
	}
	var paths []string
	for line := range strings.Lines(string(b)) {
		if _, rest, ok := strings.Cut(line, ":"); ok {
			_, path, _ := strings.Cut(rest, ":")
			paths = append(paths, strings.TrimSpace(path))
		}
	}
	for _, path := range paths {
		if o, ok := e.agent.Container(path); ok {
			return o
		}
	}
	for _, path := range paths {
		if id := containerID.FindString(path); id != "" {
			return port.Owner{Kind: port.OwnerContainer, ID: id}
		}
	}
	return port.Owner{}
}

var containerID = regexp.MustCompile(`[0-9a-f]{64}`)
