// SPDX-License-Identifier: Apache-2.0

package pair

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// Libvirt is a domain of libvirt. Files are read by the QEMU guest agent in it.
type Libvirt struct {
	Domain string
	URI    string // of libvirt; empty for virsh's own default
}

// Check implements Channel.
func (l Libvirt) Check() error { return checkName("domain", l.Domain) }

// run runs virsh.
func (l Libvirt) run(ctx context.Context, remedy, command string, args ...string) ([]byte, error) {
	if err := l.Check(); err != nil { // for CID, too
		return nil, err
	}
	virsh, err := find("virsh")
	if err != nil {
		return nil, err
	}
	all := []string{"--quiet", command, "--domain", l.Domain}
	if l.URI != "" {
		all = append([]string{"--connect=" + l.URI}, all...)
	}
	return virsh.output(ctx, remedy, append(all, args...)...)
}

// CID returns the vsock address of a domain, and whether libvirt chooses it anew at each
// start.
func (l Libvirt) CID(ctx context.Context) (cid uint32, auto bool, err error) {
	out, err := l.run(ctx, "a user's virsh does not see the system's domains: add --libvirt-uri qemu:///system for one of these (`virsh -c qemu:///system list --all`)", "dumpxml")
	if err != nil {
		return 0, false, err
	}
	return parseDomain(l.Domain, out)
}

// addVsock is what a domain without vsock needs.
const addVsock = "add <vsock model='virtio'><cid auto='no' address='3'/></vsock> to its devices by `virsh edit`, and start it again"

func parseDomain(name string, definition []byte) (cid uint32, auto bool, err error) {
	var d struct {
		XMLName xml.Name `xml:"domain"`
		CID     []struct {
			Auto    string `xml:"auto,attr"`
			Address string `xml:"address,attr"`
		} `xml:"devices>vsock>cid"`
	}
	if err := xml.Unmarshal(definition, &d); err != nil {
		return 0, false, fmt.Errorf("definition of domain %s: %w", name, err)
	}
	switch {
	case len(d.CID) != 1:
		return 0, false, fmt.Errorf("domain %s has %d vsock devices: %s", name, len(d.CID), addVsock)
	case d.CID[0].Address == "":
		return 0, false, fmt.Errorf("domain %s has no vsock address: start it, or give it one: %s", name, addVsock)
	}
	n, err := strconv.ParseUint(d.CID[0].Address, 10, 32)
	if err != nil || n < 3 || n == 1<<32-1 { // the lower ones are not for guests
		return 0, false, fmt.Errorf("domain %s: vsock address %q: want a number from 3: %s", name, d.CID[0].Address, addVsock)
	}
	return uint32(n), d.CID[0].Auto == "yes", nil
}

const needGuestAgent = "the domain needs qemu-guest-agent, which may not be allowed to read files: fetch the token with --ssh USER@HOST as well, or pass it in with --from FILE"

// closeTimeout is how long the guest agent may take to close a file.
const closeTimeout = 10 * time.Second

// Read implements Channel.
func (l Libvirt) Read(ctx context.Context, file string) (b []byte, err error) {
	var handle int64
	if err := l.ask(ctx, &handle, "guest-file-open", map[string]any{"path": file, "mode": "r"}); err != nil {
		return nil, err
	}
	defer func() { // after an interrupt as well: the guest agent keeps what is open
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		var closed struct{}
		err = errors.Join(err, l.ask(ctx, &closed, "guest-file-close", map[string]any{"handle": handle}))
	}()
	var part struct {
		Count int    `json:"count"`
		Data  []byte `json:"buf-b64"`
	}
	if err := l.ask(ctx, &part, "guest-file-read", map[string]any{"handle": handle, "count": maxToken + 1}); err != nil {
		return nil, err
	}
	if part.Count != len(part.Data) {
		return nil, fmt.Errorf("the guest agent reports %d bytes and sends %d", part.Count, len(part.Data))
	}
	return part.Data, nil
}

// ask runs a command of the guest agent, and decodes what it returns.
func (l Libvirt) ask(ctx context.Context, result any, command string, arguments map[string]any) error {
	q, err := json.Marshal(map[string]any{"execute": command, "arguments": arguments})
	if err != nil {
		return err
	}
	out, err := l.run(ctx, needGuestAgent, "qemu-agent-command", "--timeout", "30", string(q))
	if err != nil {
		return err
	}
	var answer struct {
		Return json.RawMessage `json:"return"`
	}
	if err := json.Unmarshal(out, &answer); err != nil || answer.Return == nil {
		return fmt.Errorf("%s: the guest agent's answer is not understood", command)
	}
	if err := json.Unmarshal(answer.Return, result); err != nil { // its text may be the token's
		return fmt.Errorf("%s: the guest agent's answer is not understood", command)
	}
	return nil
}
