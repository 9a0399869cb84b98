// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/netns"
)

const (
	containerPublished = "container starts → message with it as the owner of a published port"
	containerHost      = "container starts → message with it as the owner of a port in the guest's network"
)

// Pollers list all that an API has.
const modeList1, modeList3 = "list 1 s", "list 3 s"

var (
	listModes = []string{modeBPF, modeList1, modeList3}
	listEvery = map[string]time.Duration{modeList1: time.Second, modeList3: 3 * time.Second}
)

func enginePart() part {
	return part{"engine", "engine", []measure{
		{name: containerPublished, unit: "s", modes: append(append([]string{}, ownModes...), modeList1, modeList3)},
		{name: containerHost, unit: "s", modes: ownModes},
	}, inEnclave(containers)}
}

func containers(ctx context.Context, b *bench) {
	d := startDocker(ctx, b)
	var guests []*guest
	for _, m := range modes {
		g := b.newGuest(m, must(netns.Open("/proc/self/ns/net")))
		g.start("--docker-host", "unix://"+enclave.DockerSocket)
		g.connect(ctx)
		guests = append(guests, g)
	}
	polled := b.of(14, 6, 1) // of all rounds, because pollers are slow
	for i := range b.of(104, 30, 2) {
		d.round(ctx, b, guests, i, i < polled)
	}
	for _, g := range guests {
		g.check(ctx)
	}
}

// round starts a container of each kind, and waits until it was seen.
func (d *dockerd) round(ctx context.Context, b *bench, guests []*guest, i int, polled bool) {
	for j, measure := range []string{containerPublished, containerHost} {
		check(schedule.Sleep(ctx, rand.N(300*time.Millisecond)))
		name := fmt.Sprintf("bench-%d-%d", i, j)
		k := tcpKey(uint16(20_000 + 2*i + j))
		waits := map[string]wait{}
		for _, g := range guests {
			if polled || g.mode.poll == 0 || measure == containerPublished {
				waits[g.mode.name] = g.peer.expect(k, name)
			}
		}
		for mode, every := range listEvery {
			if polled && measure == containerPublished {
				waits[mode] = pollEach(ctx, every, func() bool { return d.publishes(ctx, name) })
			}
		}
		id, started := d.run(ctx, name, k.AddrPort(), measure == containerHost)
		for mode, seen := range waits {
			b.add(measure, mode, 0, seen(ctx).Sub(started).Seconds())
		}
		d.ask(ctx, http.MethodDelete, "/containers/"+id+"?force=1", nil, nil)
	}
}

// pollEach calls look in intervals, from a random moment on, until it is true.
func pollEach(ctx context.Context, every time.Duration, look func() bool) wait {
	var seen time.Time
	ended := make(chan error, 1)
	go func() {
		ended <- attempt(func() {
			check(schedule.Sleep(ctx, rand.N(every)))
			for !look() {
				check(schedule.Sleep(ctx, every))
			}
			seen = time.Now()
		})
	}()
	return func(context.Context) time.Time {
		check(<-ended)
		return seen
	}
}

// dockerd is Debian's engine in this enclave, and a client of its API.
type dockerd struct {
	client *http.Client
	events *json.Decoder // starts of containers
}

// startDocker starts the engine, and waits until it has the image.
func startDocker(ctx context.Context, b *bench) *dockerd {
	dir := b.tempDir()
	d := &dockerd{client: unixClient(enclave.DockerSocket)}
	b.daemon(ctx, dir, enclave.Dockerd(), func() error { return attempt(func() { d.ask(ctx, http.MethodGet, "/_ping", nil, nil) }) })
	tar := must(os.Open(must(enclave.ImageArchive(dir))))
	defer func() { _ = tar.Close() }()
	d.ask(ctx, http.MethodPost, "/images/load", tar, nil)
	starts := "/events?filters=" + url.QueryEscape(`{"type":["container"],"event":["start"]}`)
	events := must(d.client.Do(d.request(ctx, http.MethodGet, starts, nil))) //nolint:bodyclose // closed when the part ends
	b.cleanup(func() { _ = events.Body.Close() })
	d.events = json.NewDecoder(events.Body)
	return d
}

// daemon starts a program that lives until the part ends, and waits until it answers.
func (b *bench) daemon(ctx context.Context, dir string, args []string, answers func() error) {
	name := filepath.Join(dir, filepath.Base(args[0])+".log")
	out := must(os.Create(name))
	defer func() { _ = out.Close() }()
	cmd := exec.Command(args[0], args[1:]...) // hack/provision-engines.sh provides it
	cmd.Stdout, cmd.Stderr = out, out
	check(cmd.Start())
	b.cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		kill := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		kill.Stop()
	})
	b.progress("waiting for %s", filepath.Base(args[0]))
	if err := eventually(ctx, answers); err != nil {
		log, _ := os.ReadFile(name)
		check(fmt.Errorf("%s: %w\n%s", args[0], err, log[max(0, len(log)-1000):]))
	}
}

// request is a request to the engine; content is an io.Reader, or sent as JSON.
func (d *dockerd) request(ctx context.Context, method, path string, content any) *http.Request {
	kind := "application/x-tar"
	in, ok := content.(io.Reader)
	if !ok && content != nil {
		kind, in = "application/json", bytes.NewReader(must(json.Marshal(content)))
	}
	req := must(http.NewRequestWithContext(ctx, method, "http://docker"+path, in))
	req.Header.Set("Content-Type", kind)
	return req
}

// ask sends a request; the answer is JSON, if it is wanted.
func (d *dockerd) ask(ctx context.Context, method, path string, content, answer any) {
	text := must(fetch(d.client, d.request(ctx, method, path, content)))
	if answer != nil {
		check(json.Unmarshal([]byte(text), answer))
	}
}

// run starts a container with a web server, which publishes a port or, with the host's
// network, has that of the guest. It returns the time of the engine's event.
func (d *dockerd) run(ctx context.Context, name string, at netip.AddrPort, host bool) (id string, started time.Time) {
	type object = map[string]any
	config := object{"Image": enclave.Image, "Cmd": []string{"httpd", "-f", "-p", at.String()}, "HostConfig": object{"NetworkMode": "host"}}
	if !host {
		config["Cmd"] = []string{"httpd", "-f", "-p", "80"}
		config["ExposedPorts"] = object{"80/tcp": object{}}
		config["HostConfig"] = object{"PortBindings": object{"80/tcp": []object{{"HostIp": at.Addr().String(), "HostPort": fmt.Sprint(at.Port())}}}}
	}
	var made struct{ ID string }
	d.ask(ctx, http.MethodPost, "/containers/create?name="+name, config, &made)
	d.ask(ctx, http.MethodPost, "/containers/"+made.ID+"/start", nil, nil)
	var event struct {
		Actor    struct{ ID string }
		TimeNano int64 `json:"timeNano"`
	}
	for event.Actor.ID != made.ID {
		check(d.events.Decode(&event))
	}
	return made.ID, time.Unix(0, event.TimeNano)
}

// publishes reports whether a container of that name publishes a port.
func (d *dockerd) publishes(ctx context.Context, name string) bool {
	var all []struct {
		Names []string
		Ports []struct{ PublicPort uint16 }
	}
	d.ask(ctx, http.MethodGet, "/containers/json", nil, &all)
	for _, c := range all {
		if strings.Join(c.Names, "") == "/"+name && len(c.Ports) > 0 {
			return true
		}
	}
	return false
}
